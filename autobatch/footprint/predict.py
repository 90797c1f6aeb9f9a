"""What a step takes on a card, and the largest micro-batch that fits there, without running it.

    Setting ──record at 2, 3 and 5──► Footprint ──replay, search──► Prediction

Tracing costs seconds and no memory, whatever the batch and the card; a prediction for a further card costs
milliseconds. Where a step cannot be traced, `Unpredictable` says why in one line.

Known limitations: eager PyTorch only (a compiled model is traced as its module), one stream. Not counted are
cuDNN's scratch for convolutions, what its recurrent layers keep past their gates, temporaries inside sorting
kernels, and custom CUDA extensions; the interval of a prediction allows for the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from torch import nn

from autobatch.core.errors import AutobatchError, InputError
from autobatch.device.allocator.caching import AllocatorConfig, CachingAllocator
from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.device.allocator.trace import Replay, Trace, replay
from autobatch.footprint.cuda_policy import missing_parts
from autobatch.footprint.program import Program, Untraceable, largest
from autobatch.footprint.selftest import self_test
from autobatch.footprint.trace_mode import Label, Recording
from autobatch.footprint.trace_step import Setting, record

SIZES = (2, 3, 5, 8)
"""Micro-batches that are traced: 1 is special to many operators; two tell a line, the third checks it.
Where it does not hold, three tell a parabola and the fourth checks that."""


MARGIN = 0.03


CONVOLUTION_MARGIN = 0.1
"""Shares of a budget by which a prediction may be too high; cuDNN's scratch for convolutions is unseen."""


class Unpredictable(AutobatchError, RuntimeError):  # noqa: N818 - says what a step is, not what went wrong
    """The footprint of this step cannot be predicted; the message says why, in one line."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What a step allocates at any micro-batch."""

    program: Program
    labels: tuple[Label, ...]
    """By block number."""
    first_products: tuple[int, ...]
    """Where libraries take their workspaces; see `autobatch.footprint.trace_mode.Recording`."""
    margin: float
    """Share of a budget by which its prediction may be too high."""
    notes: tuple[str, ...]
    """What a person should know of it, a line each."""
    seconds: float
    """What tracing took."""


class Prediction(NamedTuple):
    """What fits on a card."""

    micro_batch: int
    """The largest that is predicted to fit, 0 if none is; or the one that was asked about."""
    micro_batch_low: int
    """The largest with the margin taken off the budget."""
    micro_batch_high: int
    """The largest if fragmentation cost nothing."""
    fits: bool
    """Whether ``micro_batch`` fits."""
    outcome: Replay
    """The replay at ``micro_batch`` (at 1, if that is 0); without the budget, if it does not fit in it."""

    @property
    def peak_allocated_bytes(self) -> int:
        """The most that live blocks hold."""
        return self.outcome.peak_allocated_bytes

    @property
    def peak_reserved_bytes(self) -> int | None:
        """The most that the allocator holds."""
        return self.outcome.peak_reserved_bytes


def footprint(
    setting: Setting, *, tested: bool = False, clock: Callable[[], float] = time.perf_counter
) -> Footprint:
    """Trace a step at a few small micro-batches, and fit a program to what it allocates.

    Args:
        setting: what to trace.
        tested: this torch has passed the self-test already.
        clock: seconds.

    Raises:
        Unpredictable: it cannot be traced, or follows no rule in the micro-batch; says why.
    """
    start = clock()
    trouble = None if tested else _trouble()
    if trouble:
        raise Unpredictable(f"cannot predict: {trouble}")
    first = _record(setting, SIZES[0])
    try:
        program = _fit(setting, first.trace)
    except Untraceable as error:
        raise Unpredictable(f"cannot predict: {error}") from error
    return Footprint(
        program=program,
        labels=first.labels,
        first_products=first.first_products,
        margin=CONVOLUTION_MARGIN if first.has_convolutions else MARGIN,
        notes=tuple(_notes(setting, first)),
        seconds=clock() - start,
    )


def predict(
    step: Footprint,
    *,
    budget_bytes: int,
    cap: int,
    micro_batch: int | None = None,
    workspaces: tuple[int, int] | None = None,
    config: AllocatorConfig | None = None,
) -> Prediction:
    """Say what fits in a budget.

    Args:
        step: what it allocates.
        budget_bytes: what the allocator may hold.
        cap: the largest micro-batch asked for.
        micro_batch: ask about this one in place of the largest.
        workspaces: bytes of one cuBLAS workspace and how many of them a process holds; ``None``: none.
        config: how the allocator grows.

    Raises:
        Unpredictable: the step follows no rule at a size that was tried.
    """
    program = with_workspaces(step, workspaces)

    def allocator(share: float = 1) -> CachingAllocator:
        return CachingAllocator(int(budget_bytes * share), config)

    try:
        # Each is a cap for the next: what live bytes alone outgrow fits in no allocator.
        high = largest(program, lambda: CountingAllocator(budget_bytes), cap, neighbours=0) or 0
        best = largest(program, allocator, high) or 0
        low = largest(program, lambda: allocator(1 - step.margin), best, neighbours=0) or 0
        asked = best if micro_batch is None else micro_batch
        outcome = replay(program.at(max(1, asked)), allocator())
        fits = outcome.fits and asked > 0
        if not outcome.fits:
            outcome = replay(program.at(max(1, asked)), CachingAllocator(None, config))
    except Untraceable as error:
        raise Unpredictable(f"cannot predict: {error}") from error
    return Prediction(asked, low, high, fits, outcome)


def with_workspaces(step: Footprint, workspaces: tuple[int, int] | None) -> Program:
    """The program with the workspaces of cuBLAS: one at the first product of the forward, one of the
    backward.

    A handle a thread, and the backward has a thread of its own (ATen/cuda/CublasHandlePool.cpp); they stay.
    """
    if workspaces is None:
        return step.program
    size, count = workspaces
    return step.program.with_blocks([(index, size) for index in step.first_products[:count]])


def _trouble() -> str | None:
    """Why nothing can be predicted with this torch."""
    missing = missing_parts()
    return f"this torch has no {', '.join(missing)}" if missing else self_test()


def _fit(setting: Setting, first: Trace) -> Program:
    """The program behind traces at the first sizes, that a trace at the size after them begins like."""
    points = [(SIZES[0], first)]
    # Sizes follow the micro-batch in the first window as in all; only the first ends without later ones.
    short = replace(setting, steps=setting.steps[:1])
    for size, check in pairwise(SIZES[1:]):
        points.append((size, _record(setting, size).trace))
        program = Program.fit(points)
        if program.begins_with(check, _record(short, check).trace):
            return program
    raise Untraceable("its allocations follow no polynomial in the micro-batch")


def _record(setting: Setting, size: int) -> Recording:
    try:
        return record(setting, size)
    except InputError:
        raise
    except Exception as error:
        raise Unpredictable(f"cannot predict: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Why a step cannot run on fakes, in one line."""
    kind = type(error).__name__
    first = (str(error).strip().splitlines() or [""])[0]
    if kind in {"DynamicOutputShapeException", "DataDependentOutputException"}:
        return f"the result of {getattr(error, 'func', first)} depends on the values of the data"
    if kind == "UnsupportedOperatorException":
        return f"{getattr(error, 'func', first)} cannot be run without values"
    return f"the step does not run without values ({kind}: {first[:200]})"


def _notes(setting: Setting, recording: Recording) -> list[str]:
    notes = []
    if recording.has_convolutions:
        notes.append("convolutions: cuDNN's scratch space is not predicted, the interval allows 10 % for it")
    if recording.keeps_everything:
        notes.append("a selection by a mask: predicted as if it kept everything, which is the most it can be")
    if any(isinstance(module, nn.RNNBase) for module in setting.model.modules()):
        notes.append(
            "recurrent layers: what cuDNN keeps is not told by a trace, but as much as their gates is counted"
        )
    if hasattr(setting.model, "_orig_mod"):
        notes.append("a compiled model: predicted as its module runs without the compiler, which needs more")
    return notes
