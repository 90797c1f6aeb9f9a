"""The GPUs of an estimate: those that the options name, their budgets, and what is tried on them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from autobatch.core.errors import InputError
from autobatch.core.options import Options, PrecisionChoice
from autobatch.core.records import Estimate, Precision
from autobatch.core.units import GiB, format_bytes
from autobatch.device.base import GPU_HEADROOM_SHARE, resolve_budget
from autobatch.device.profiles import HardwareProfile, list_profiles, load_profile
from autobatch.footprint.predict import gpu_allocator
from autobatch.footprint.suggestions import NATIVE_BF16, Spending

LARGEST = 2**31 - 1
"""The largest micro-batch of any search, for a step whose memory does not grow."""
TABLE_GPUS = 3
"""GPUs in the table of ranks, if only one was asked about."""
NCCL_BYTES = 1 * GiB
"""Memory of NCCL on a GPU, outside of the allocator. Users measure from a few hundred MiB to 1.6 GB, by
channels, links and GPU (github.com/NVIDIA/nccl/issues/864 and 1685)."""


def precision_on(capability: tuple[int, int], asked: PrecisionChoice) -> Precision:
    """Return the precision that was asked for; else bf16 where it is native."""
    if asked != "auto":
        return asked
    return "bf16" if capability >= NATIVE_BF16 else "fp32"


class GpuChoice:
    """The GPUs of an estimate, their budgets, and what is tried on them.

    Raises:
        InputError: the model would be shared by a single rank.
    """

    def __init__(self, options: Options, home: Path) -> None:
        self._options = options
        self._home = home
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

    @property
    def names(self) -> Sequence[str]:
        """Names of the GPUs to predict for; none for all that are known."""
        search, device = self._options.search, self._options.device.device
        if search.all:
            return ()
        return search.profile or ([device.removeprefix("sim:")] if device.startswith("sim:") else [])

    def load(self) -> list[HardwareProfile]:
        """Return the GPUs that the options name, or all that are known.

        Raises:
            InputError: a profile is unknown or invalid.
        """
        if self.names:
            return [load_profile(name, user_dir=self._home) for name in self.names]
        return list(list_profiles(user_dir=self._home).profiles)

    def larger(self, gpu: HardwareProfile) -> list[HardwareProfile]:
        """Return the next GPUs with more memory and at least the same operators."""
        others = [
            other
            for other in list_profiles(user_dir=self._home).profiles
            if other.total_bytes > gpu.total_bytes
            and (other.compute_capability >= NATIVE_BF16) >= (gpu.compute_capability >= NATIVE_BF16)
        ]
        by_memory = {
            other.total_bytes // GiB: other for other in sorted(others, key=lambda o: o.name, reverse=True)
        }
        return [by_memory[size] for size in sorted(by_memory)][: TABLE_GPUS - 1]

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

    def spending(self, gpu: HardwareProfile, cap: int | None = None) -> Spending:
        """Return the budget of a GPU, and the largest micro-batch to try; None for that of all GPUs."""
        return Spending(
            allocator=partial(gpu_allocator, self.budget(gpu)[0]),
            unlimited=partial(gpu_allocator, None),
            cap=cap or self.cap,
            libraries=gpu.libraries,
        )

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
        if small and not self.names:
            notes.append(
                f"nothing fits on {small} of {len(estimates)} GPUs: --profile NAME says what would help"
            )
        if self.world > 1 and device.memory_budget is None:
            notes.append(
                f"each budget leaves {format_bytes(NCCL_BYTES)} for the buffers of NCCL, not measured here"
            )
        return notes
