"""The GPUs of an estimate, their budgets, and what fits of a step in a budget.

    live bytes in the budget ≥ replay in the budget ≥ replay in the budget less the margin

Without fragmentation no more than the first fits, so that is the upper end. No trace shows what libraries
hold beside the tensors. The workspaces of cuBLAS are counted, and the lower end leaves a margin for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from autobatch.core.errors import InputError
from autobatch.core.options import Options
from autobatch.core.records import Estimate, Precision
from autobatch.core.text import listed
from autobatch.core.units import GiB, KiB, format_bytes
from autobatch.device.allocator import Allocator, CachingAllocator
from autobatch.device.base import GPU_HEADROOM_SHARE, resolve_budget
from autobatch.device.profiles import HardwareProfile, list_profiles, load_profile
from autobatch.device.trace import replay
from autobatch.estimates.footprints import Footprint
from autobatch.footprint.program import Fitting
from autobatch.report.facts import plural

LARGEST = 2**31 - 1
"""The largest micro-batch of any search, for a step whose memory does not grow."""
MOST_NAMED = 3
"""GPUs that a note names; more are counted."""
NCCL_BYTES = 1 * GiB
"""Memory of NCCL on a GPU, outside of the allocator. Users measure from a few hundred MiB to 1.6 GB, by
channels, links and GPU (github.com/NVIDIA/nccl/issues/864 and 1685)."""


class Prediction(NamedTuple):
    """The largest micro-batch that fits, as in an `Estimate`."""

    micro_batch: int
    """The largest that is predicted to fit, 0 if none does; or the requested one."""
    micro_batch_low: int
    """The largest in the budget less the margin."""
    micro_batch_high: int
    """The largest without fragmentation."""
    fits: bool
    """True if ``micro_batch`` fits."""
    peak_allocated_bytes: int
    """Peak of a replay at ``micro_batch`` (at 1 if that is 0), without a limit if it does not fit."""
    peak_reserved_bytes: int | None


class Spending(NamedTuple):
    """A budget, and the sizes to spend it on."""

    budget_bytes: int
    new_allocator: Callable[[int | None, bool], Allocator]
    """Returns an empty allocator with a limit, None for no limit; with expandable segments if True."""
    cap: int
    """The largest micro-batch to try."""
    can_expand: bool = True
    """True if segments can be expandable, and are not yet."""
    held_bytes: int = 0
    """Bytes that each allocator of ``new_allocator`` begins with."""

    def largest(self, step: Footprint, *, expandable: bool = False) -> tuple[int, int]:
        """Return the largest micro-batch of a step that fits, 0 if none does, and its peak, or that of 1."""
        size = self._most(step, partial(self.new_allocator, self.budget_bytes, expandable), self.cap)
        peaks = replay(step.program.at(max(1, size)), self.new_allocator(None, expandable))
        reserved = peaks.peak_reserved_bytes
        return size, peaks.peak_allocated_bytes if reserved is None else reserved

    def predict(self, step: Footprint, micro_batch: int | None = None) -> Prediction:
        """Predict what fits of a step, or whether one size does."""
        less = int(self.budget_bytes * (1 - step.margin))
        # Each limits the next: if the live bytes alone exceed the budget, no allocator fits them.
        high = self._most(step, partial(Allocator, self.budget_bytes - self.held_bytes), self.cap)
        best = self._most(step, partial(self.new_allocator, self.budget_bytes, False), high)
        low = self._most(step, partial(self.new_allocator, less, False), best)
        asked = best if micro_batch is None else micro_batch
        trace = step.program.at(max(1, asked))
        outcome = replay(trace, self.new_allocator(self.budget_bytes, False))
        fits = outcome.fits and asked > 0
        if not outcome.fits:
            outcome = replay(trace, self.new_allocator(None, False))
        return Prediction(asked, low, high, fits, outcome.peak_allocated_bytes, outcome.peak_reserved_bytes)

    def _most(self, step: Footprint, new_allocator: Callable[[], Allocator], cap: int) -> int:
        return Fitting([step.program], new_allocator).largest(cap, step.multiple)


class Gpus:
    """The GPUs that the options name, or all that are known.

    Raises:
        InputError: a profile is unknown or invalid, or the model would be shared by a single rank.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self.precision: Precision = options.precision
        self.world = options.ranks or 1
        """Ranks, one per GPU."""
        caps = (options.max_micro_batch, options.target_batch, LARGEST)
        self.cap = min(cap for cap in caps if cap is not None)
        """The largest micro-batch to try. The data are no cap: a GPU that is not here may see more."""
        if self.world == 1 and options.parallel == "shard":
            raise InputError(
                "--parallel shard shares a model among ranks, found --ranks "
                f"{options.ranks or 'unset'}: give --ranks N with N at least 2"
            )
        of_device = [options.device.removeprefix("sim:")] if options.device.startswith("sim:") else []
        names = options.profile or of_device
        self.are_named = bool(names)
        """True if the options name GPUs; else these are all that are known."""
        named = [load_profile(name) for name in names]
        self.asked: list[HardwareProfile] = named or list_profiles()

    def budget(self, gpu: HardwareProfile) -> tuple[int, str]:
        """Return the bytes that the allocator may hold on a GPU, and the reason in words.

        Raises:
            InputError: the budget is no size, or exceeds the memory of the GPU.
        """
        return resolve_budget(
            self._options.memory_budget,
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
        allocator = partial(CachingAllocator, held_bytes=held)
        return Spending(self.budget(gpu)[0], allocator, self.cap, held_bytes=held)

    def notes(self, estimates: Sequence[Estimate]) -> list[str]:
        """Return what the options bound or leave room for, one line each."""
        notes, options, cap = [], self._options, self.cap
        names = [estimate.profile for estimate in estimates if estimate.fits and estimate.micro_batch == cap]
        if options.micro_batch is None and names:
            option = "--max-micro-batch" if cap == options.max_micro_batch else "--target-batch"
            notes.append(f"{option} {cap:,} bounds the micro-batch on {few(names)}: more may fit without it")
        if self.world > 1 and options.memory_budget is None:
            notes.append(
                f"each budget leaves {format_bytes(NCCL_BYTES)} for the buffers of NCCL, not measured here"
            )
        return notes


def few(names: Sequence[str]) -> str:
    """Name a few GPUs, or count many."""
    return listed(names) if len(names) <= MOST_NAMED else plural(len(names), "GPU")


def workspace_bytes(capability: tuple[int, int]) -> int:
    """Return the bytes of the workspaces of cuBLAS, one for the forward and one for the backward pass.

    The sizes are torch's defaults of ``CUBLAS_WORKSPACE_CONFIG``: ``:4096:2:16:8``, and ``:4096:8`` from
    compute capability 9.0 on, in KiB times their number (notes/cuda, "cuBLAS workspaces").
    """
    return 2 * KiB * (4096 * 8 if capability >= (9, 0) else 4096 * 2 + 16 * 8)
