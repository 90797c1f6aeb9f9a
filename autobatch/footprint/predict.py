"""Prediction of a step's memory on a GPU, and of the largest micro-batch that fits, without running it.

    Setting ──record at 2, 3 and 5──► Footprint ──replay, search──► Prediction

Tracing takes seconds and no memory, for any batch and GPU. A prediction for another GPU takes milliseconds.
`Unpredictable` gives the reason in one line if a step cannot be traced.

Known limitations: eager PyTorch only (a compiled model is traced as its module) and one stream. Not counted
are cuDNN's scratch memory for convolutions, memory of its recurrent layers beyond their gates, temporaries
inside sorting kernels, and custom CUDA extensions. The interval of a prediction allows for the first.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from autobatch.core.errors import AutobatchError, InputError
from autobatch.device.allocator.caching import AllocatorConfig, CachingAllocator
from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.device.allocator.trace import Replay, replay
from autobatch.device.cuda_settings import keeps_workspaces
from autobatch.footprint.apart import run_each_apart
from autobatch.footprint.cuda_policy import missing_parts
from autobatch.footprint.largest import largest
from autobatch.footprint.program import Program, Untraceable
from autobatch.footprint.selftest import self_test
from autobatch.footprint.trace_mode import Label, Recording
from autobatch.footprint.trace_step import Setting, record
from autobatch.workload.contract import Collated
from autobatch.workload.rng import preserved_random_state

SIZES = (2, 3, 5, 8)
"""Micro-batches to trace. Many operators treat 1 as special. Two sizes give a line, the third checks it. If
the line is wrong, three give a parabola and the fourth checks that."""
MARGIN = 0.03
"""Share of a budget by which a prediction may be too high."""
CONVOLUTION_MARGIN = 0.1
"""The same with convolutions, because no trace shows cuDNN's scratch memory."""


class Unpredictable(AutobatchError, RuntimeError):  # noqa: N818 - describes the step, not a fault
    """A step whose footprint cannot be predicted, with the reason in one line."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The allocations of a step at any micro-batch."""

    program: Program
    labels: tuple[Label, ...]
    """By block number."""
    first_products: tuple[int, ...]
    """Events at which libraries take their workspaces; see `autobatch.footprint.trace_mode.Recording`."""
    products: tuple[int, ...]
    """The same for workspaces that are freed after each product."""
    margin: float
    """Share of a budget by which a prediction may be too high."""
    notes: tuple[str, ...]
    """Remarks for the user, one line each."""
    seconds: float
    """Duration of tracing."""


class Prediction(NamedTuple):
    """The largest micro-batch that fits on a GPU."""

    micro_batch: int
    """The largest that is predicted to fit, 0 if none does; or the requested one."""
    micro_batch_low: int
    """The largest within the budget less the margin."""
    micro_batch_high: int
    """The largest without fragmentation."""
    fits: bool
    """True if ``micro_batch`` fits."""
    outcome: Replay
    """Replay at ``micro_batch`` (at 1 if that is 0), without a limit if it does not fit."""

    @property
    def peak_allocated_bytes(self) -> int:
        """Peak of the bytes in live blocks."""
        return self.outcome.peak_allocated_bytes

    @property
    def peak_reserved_bytes(self) -> int | None:
        """Peak of the bytes that the allocator holds."""
        return self.outcome.peak_reserved_bytes


def footprint(
    setting: Setting, *, tested: bool = False, clock: Callable[[], float] = time.perf_counter
) -> Footprint:
    """Trace a step at a few small micro-batches, and fit a program to its allocations.

    Args:
        setting: what to trace.
        tested: skip the self-test, because this torch has passed it.
        clock: returns seconds.

    Raises:
        Unpredictable: the step cannot be traced, or follows no rule in the micro-batch.
    """
    start = clock()
    reason = None if tested else _why_untrusted()
    if reason:
        raise Unpredictable(f"cannot predict: {reason}")
    try:
        first, program = _fit(setting)
    except Untraceable as error:
        raise Unpredictable(f"cannot predict: {error}") from error
    return Footprint(
        program=program,
        labels=first.labels,
        first_products=first.first_products,
        products=first.products,
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
    """Predict the largest micro-batch that fits in a budget.

    Args:
        step: the footprint.
        budget_bytes: bytes that the allocator may hold.
        cap: the largest micro-batch to try.
        micro_batch: predict this size in place of the largest.
        workspaces: bytes of one cuBLAS workspace and their number per process, None for no workspaces.
        config: how the allocator grows, None for torch's default.

    Raises:
        Unpredictable: the footprint is invalid at a size that was tried.
    """
    program = with_workspaces(step, workspaces)

    def allocator(share: float = 1) -> CachingAllocator:
        return CachingAllocator(int(budget_bytes * share), config)

    try:
        # Each limits the next: if the live bytes alone exceed the budget, no allocator fits them.
        high = largest(program, lambda: CountingAllocator(budget_bytes), cap, neighbours=0) or 0
        best = largest(program, allocator, high) or 0
        cautious = partial(allocator, 1 - step.margin)
        low = largest(program, cautious, best, neighbours=0) or 0
        asked = best if micro_batch is None else micro_batch
        outcome = replay(program.at(max(1, asked)), allocator())
        fits = outcome.fits and asked > 0
        if not outcome.fits:
            outcome = replay(program.at(max(1, asked)), CachingAllocator(None, config))
    except Untraceable as error:
        raise Unpredictable(f"cannot predict: {error}") from error
    return Prediction(asked, low, high, fits, outcome)


def with_workspaces(
    step: Footprint, workspaces: tuple[int, int] | None, *, are_kept: bool | None = None
) -> Program:
    """Return the program with cuBLAS workspaces.

    Until torch 2.14 each thread takes one at its first product and keeps it, and the backward has its own
    thread. From 2.15 on, each product takes one and frees it (ATen/cuda/CublasHandlePool.cpp).

    Args:
        step: the footprint.
        workspaces: bytes of one, and the number that is kept in a process; None for no workspaces.
        are_kept: whether they are kept; None to ask this torch.
    """
    if workspaces is None:
        return step.program
    size, count = workspaces
    if are_kept is None:
        are_kept = keeps_workspaces(str(torch.__version__), os.environ)
    if not are_kept:
        return step.program.with_scratch(step.products, size)
    return step.program.with_blocks([(index, size) for index in step.first_products[:count]])


def _why_untrusted() -> str | None:
    """Return the reason why this torch allows no predictions, None if it does."""
    missing = missing_parts()
    return f"this torch has no {', '.join(missing)}" if missing else self_test()


def _fit(setting: Setting) -> tuple[Recording, Program]:
    """Fit a program to traces at the first sizes, and check it by the start of a trace at the next one.

    Returns:
        The trace at the first size, and the program.
    """
    # All steps follow the same rule, so the first step is enough for the check.
    short = replace(setting, steps=setting.steps[:1])
    first, second, third, fourth = SIZES
    one, two, check = record_apart((setting, first), (setting, second), (short, third))
    points = [(first, one.trace), (second, two.trace)]
    program = Program.fit(points)
    if program.begins_with(third, check.trace):
        return one, program
    three, check = record_apart((setting, third), (short, fourth))
    program = Program.fit([*points, (third, three.trace)])
    if program.begins_with(fourth, check.trace):
        return one, program
    raise Untraceable("the sizes of its allocations are no polynomial in the micro-batch")


def record_apart(*traced: tuple[Setting, int]) -> list[Recording]:
    """Trace settings at sizes, each in a process of its own, from batches that are read here."""
    try:
        return run_each_apart([partial(_recorded, *one, _batch_of(*one)) for one in traced])
    except AutobatchError:
        raise
    except Exception as error:
        raise Unpredictable(f"cannot predict: {_reason(error)}") from error


def _batch_of(setting: Setting, size: int) -> Collated:
    """Read a batch. Augmented data draw the same random numbers for each size."""
    with preserved_random_state():
        return setting.batch_of(size)


def _recorded(setting: Setting, size: int, batch: Collated) -> Recording:
    try:
        return record(replace(setting, batch_of=lambda _: batch), size)
    except InputError:
        raise
    except Exception as error:
        raise Unpredictable(f"cannot predict: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Return the reason why a step does not run on fake tensors, in one line."""
    kind = type(error).__name__
    first = (str(error).strip().splitlines() or [""])[0]
    if kind in {"DynamicOutputShapeException", "DataDependentOutputException"}:
        return f"the result of {getattr(error, 'func', first)} depends on the values of the data"
    if kind == "UnsupportedOperatorException":
        return f"{getattr(error, 'func', first)} needs the values of the data"
    return f"the step does not run without values ({kind}: {first[:200]})"


def _notes(setting: Setting, recording: Recording) -> list[str]:
    notes = []
    if recording.has_convolutions:
        notes.append(
            "convolutions: no trace shows the scratch memory of cuDNN, so the interval allows 10 % for it"
        )
    if recording.has_selections:
        notes.append(
            "selections by values: predicted as if they kept everything, which is their largest result"
        )
    if any(isinstance(module, nn.RNNBase) for module in setting.model.modules()):
        notes.append(
            "recurrent layers: no trace shows what cuDNN keeps, so the size of their gates is counted instead"
        )
    if hasattr(setting.model, "_orig_mod"):
        notes.append("a compiled model: predicted as if it were not compiled, which needs more memory")
    return notes
