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
from autobatch.core.records import Estimate
from autobatch.core.text import listed
from autobatch.core.units import GiB, KiB, format_bytes
from autobatch.device.allocator import Allocator, CachingAllocator
from autobatch.device.base import GPU_HEADROOM_SHARE, resolve_budget
from autobatch.device.profiles import HardwareProfile, list_profiles, load_profile
from autobatch.device.trace import replay
from autobatch.estimates.traced_step import Footprint
from autobatch.footprint.program import Fitting
from autobatch.report.facts import plural

LARGEST = 2**31 - 1
"""The largest micro-batch of any search, for a step whose memory does not grow."""
MOST_NAMED = 3
"""GPUs that a note names; more are counted."""
NCCL_BYTES = 1 * GiB
"""Memory of NCCL on a GPU, outside of the allocator. Users measure from a few hundred MiB to 1.6 GB, by
channels, links and GPU (github.com/NVIDIA/nccl/issues/864 and 1685)."""


WORKSPACE_BYTES = KiB * (4096 * 2 + 16 * 8), KiB * 4096 * 8
"""Workspace of cuBLAS, of which the forward and the backward pass have one each: torch's defaults of
``CUBLAS_WORKSPACE_CONFIG``, ``:4096:2:16:8``, and ``:4096:8`` from compute capability 9.0 on, in KiB times
their number (notes/cuda, "cuBLAS workspaces")."""


class Budget(NamedTuple):
    """The bytes that the allocator may hold on a GPU, and the sizes to spend them on."""

    gpu: str
    budget_bytes: int
    source: str
    """Origin of the budget, in words."""
    new_allocator: Callable[..., Allocator]
    """Models the allocator, with a limit; one that caches also takes ``expandable=True``."""
    cap: int
    """The largest micro-batch to try."""

    @property
    def held_bytes(self) -> int:
        """The bytes that the allocator begins with."""
        return self.new_allocator(None).allocated_bytes

    def largest(self, step: Footprint) -> tuple[int, int]:
        """Return the largest micro-batch of a step that fits, 0 if none does, and its peak, or that of 1."""
        size = self._most(step, partial(self.new_allocator, self.budget_bytes), self.cap)
        peaks = replay(step.program.at(max(1, size)), self.new_allocator(None))
        reserved = peaks.peak_reserved_bytes
        return size, peaks.peak_allocated_bytes if reserved is None else reserved

    def predict(self, step: Footprint, micro_batch: int | None = None) -> Estimate:
        """Predict what fits of a step, or whether one size does."""
        less = int(self.budget_bytes * (1 - step.margin))
        # Each limits the next: if the live bytes alone exceed the budget, no allocator fits them.
        high = self._most(step, partial(Allocator, self.budget_bytes - self.held_bytes), self.cap)
        best = self._most(step, partial(self.new_allocator, self.budget_bytes), high)
        low = self._most(step, partial(self.new_allocator, less), best)
        asked = best if micro_batch is None else micro_batch
        trace = step.program.at(max(1, asked))
        outcome = replay(trace, self.new_allocator(self.budget_bytes))
        fits = outcome.fits and asked > 0
        if not outcome.fits:
            outcome = replay(trace, self.new_allocator(None))
        return Estimate(
            profile=self.gpu,
            budget_bytes=self.budget_bytes,
            budget_source=self.source,
            micro_batch=asked,
            micro_batch_low=low,
            micro_batch_high=high,
            fits=fits,
            peak_allocated_bytes=outcome.peak_allocated_bytes,
            peak_reserved_bytes=outcome.peak_reserved_bytes,
        )

    def _most(self, step: Footprint, allocator: Callable[[], Allocator], cap: int) -> int:
        return Fitting([step.program], allocator).largest(cap, step.multiple)


class Gpus:
    """The GPUs that the options name, or all that are known.

    Raises:
        InputError: a profile is unknown or invalid, or the model would be shared by a single rank.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
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

    def budget(self, gpu: HardwareProfile) -> Budget:
        """Return the budget of a GPU.

        Raises:
            InputError: the budget is no size, or exceeds the memory of the GPU.
        """
        found, source = resolve_budget(
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
        workspaces = 2 * WORKSPACE_BYTES[gpu.compute_capability >= (9, 0)]
        allocator = partial(CachingAllocator, held_bytes=workspaces)
        return Budget(gpu.name, found, source, allocator, self.cap)

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
