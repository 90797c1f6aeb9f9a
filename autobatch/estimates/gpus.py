"""The GPUs of an estimate: those that the options name, their budgets, and the sizes to try on them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from autobatch.core.errors import InputError
from autobatch.core.options import Options
from autobatch.core.records import Estimate, Precision
from autobatch.core.units import GiB, format_bytes
from autobatch.device.base import GPU_HEADROOM_SHARE, resolve_budget
from autobatch.device.profiles import HardwareProfile, list_profiles, load_profile
from autobatch.estimates.predict import Spending, gpu_allocator, workspace_bytes

LARGEST = 2**31 - 1
"""The largest micro-batch of any search, for a step whose memory does not grow."""
NCCL_BYTES = 1 * GiB
"""Memory of NCCL on a GPU, outside of the allocator. Users measure from a few hundred MiB to 1.6 GB, by
channels, links and GPU (github.com/NVIDIA/nccl/issues/864 and 1685)."""


class Gpus:
    """The GPUs of an estimate.

    Raises:
        InputError: a profile is unknown or invalid, or the model would be shared by a single rank.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self.precision: Precision = options.device.precision
        self.world = max(options.rank_counts, default=1)
        """Ranks, one per GPU; the most that were asked for."""
        caps = (options.search.max_micro_batch, options.batch.target_batch, LARGEST)
        self.cap = min(cap for cap in caps if cap is not None)
        """The largest micro-batch to try. The data are no cap: a GPU that is not here may see more."""
        if self.world == 1 and options.ranks.parallel == "shard":
            raise InputError(
                "--parallel shard shares a model among ranks, found --ranks "
                f"{options.ranks.ranks or 'unset'}: give --ranks N with N at least 2"
            )
        search, device = options.search, options.device.device
        simulated = [device.removeprefix("sim:")] if device.startswith("sim:") else []
        names = search.profile or simulated
        self.are_named = bool(names)
        """True if the options name GPUs; else these are all that are known."""
        self.asked = [load_profile(name) for name in names]
        if not names:
            self.asked += list_profiles()

    def budget(self, gpu: HardwareProfile) -> tuple[int, str]:
        """Return the bytes that the allocator may hold on a GPU, and the reason in words.

        Raises:
            InputError: the budget is no size, or exceeds the memory of the GPU.
        """
        return resolve_budget(
            self._options.device.memory_budget,
            total_bytes=gpu.total_bytes,
            available=[
                (gpu.total_bytes, "in total"),
                (-gpu.context_bytes, "CUDA context"),
                *([(-NCCL_BYTES, "NCCL")] if self.world > 1 else []),
            ],
            headroom_share=GPU_HEADROOM_SHARE,
            owner=gpu.title,
        )

    def spending(self, gpu: HardwareProfile) -> Spending:
        """Return the budget of a GPU, and the largest micro-batch to try."""
        held = workspace_bytes(gpu.compute_capability)
        allocator = partial(gpu_allocator, held_bytes=held)
        return Spending(self.budget(gpu)[0], allocator, self.cap, held_bytes=held)

    def notes(self, estimates: Sequence[Estimate]) -> list[str]:
        """Return what the options leave out or bound, one line each."""
        notes = []
        device, search, cap = self._options.device, self._options.search, self.cap
        if device.device != "auto" and not (device.device.startswith("sim:") and not search.profile):
            notes.append(
                f"an estimate touches no device, so --device {device.device} was left out: name a GPU with "
                "--profile or --device sim:PROFILE"
            )
        names = [one.profile for one in estimates if one.fits and one.micro_batch == cap]
        if search.micro_batch is None and names:
            option = "--max-micro-batch" if cap == search.max_micro_batch else "--target-batch"
            notes.append(
                f"{option} {cap:,} bounds the micro-batch on {', '.join(names)}: more may fit without it"
            )
        small = sum(not one.fits for one in estimates)
        if small and len(estimates) > 1:
            notes.append(
                f"nothing fits on {small} of {len(estimates)} GPUs: --profile NAME says what would help"
            )
        if self.world > 1 and device.memory_budget is None:
            notes.append(
                f"each budget leaves {format_bytes(NCCL_BYTES)} for the buffers of NCCL, not measured here"
            )
        return notes
