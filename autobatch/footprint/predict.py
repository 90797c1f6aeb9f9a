"""Prediction of a step's memory, and of the largest micro-batch that fits, without running it.

    Program ──live bytes──► bound ──replays──► m fits, and m + 1 does not

A prediction for another GPU takes milliseconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from autobatch.device.allocator.caching import AllocatorConfig, CachingAllocator
from autobatch.device.allocator.ledger import Allocator, CountingAllocator
from autobatch.device.allocator.trace import Replay, replay
from autobatch.device.cuda_allocator import FUSED_WORKSPACE_BYTES, WorkspaceRule, workspace_rule
from autobatch.device.profiles import Libraries
from autobatch.footprint.fit import Footprint, Unpredictable
from autobatch.footprint.fitting import Fitting
from autobatch.footprint.program import Program, Untraceable


class Prediction(NamedTuple):
    """The largest micro-batch that fits on a GPU."""

    micro_batch: int
    """The largest that is predicted to fit, 0 if none does; or the requested one."""
    micro_batch_low: int
    """The largest within the budget less the margin, wherever the driver puts segments."""
    micro_batch_high: int
    """The largest without fragmentation."""
    fits: bool
    """True if ``micro_batch`` fits."""
    outcome: Replay
    """Replay at ``micro_batch`` (at 1 if that is 0), without a limit if it does not fit."""


def predict(
    step: Footprint,
    *,
    budget_bytes: int,
    cap: int,
    micro_batch: int | None = None,
    libraries: Libraries | None = None,
) -> Prediction:
    """Predict the largest micro-batch that fits in a budget.

    Args:
        step: the footprint.
        budget_bytes: bytes that the allocator may hold.
        cap: the largest micro-batch to try.
        micro_batch: predict this size in place of the largest.
        libraries: of the GPU; None to leave them out.

    Raises:
        Unpredictable: the footprint is invalid at a size that was tried.
    """
    program = program_on(step, libraries)

    def most(new_allocator: Callable[[], Allocator], cap: int) -> int:
        return Fitting([program], new_allocator).largest(cap, step.multiple)

    try:
        # Each limits the next: if the live bytes alone exceed the budget, no allocator fits them.
        high = most(partial(CountingAllocator, budget_bytes), cap)
        best = most(partial(gpu_allocator, budget_bytes), high)
        # The driver decides where segments lie: each above those before it, or below them.
        less = int(budget_bytes * (1 - step.margin))
        low = min(most(partial(gpu_allocator, less, falls=falls), best) for falls in (False, True))
        asked = best if micro_batch is None else micro_batch
        trace = program.at(max(1, asked))
        outcome = replay(trace, gpu_allocator(budget_bytes))
        fits = outcome.fits and asked > 0
        if not outcome.fits:
            outcome = replay(trace, gpu_allocator(None))
    except Untraceable as error:
        raise Unpredictable(f"cannot predict: {error}") from error
    return Prediction(asked, low, high, fits, outcome)


def gpu_allocator(limit: int | None, expandable: bool = False, *, falls: bool = False) -> CachingAllocator:
    """Return an empty model of a GPU's allocator.

    As on the GPU itself, a step does not fit if the allocator has to empty its cache to find memory for it:
    each later step would do so too, and take several times as long.
    """
    return CachingAllocator(
        limit, AllocatorConfig(expandable_segments=expandable, retries=False, falls=falls)
    )


def program_on(step: Footprint, libraries: Libraries | None, *, rule: WorkspaceRule | None = None) -> Program:
    """Return the program of a step on a GPU: with cuBLAS workspaces, and the scratch of its reductions.

    Args:
        step: the footprint.
        libraries: of the GPU; None for no workspaces, and the usual processors.
        rule: for the workspaces; None for that of this torch.
    """
    if libraries is None:
        return step.program
    program = step.program.on(libraries.processors)
    if libraries.workspaces is None:
        return program
    size = libraries.workspaces[0]
    rule = rule or workspace_rule(str(torch.__version__), os.environ)
    if rule == "freed":
        taken = [(one.at, FUSED_WORKSPACE_BYTES if one.is_fused else size) for one in step.products]
        return program.with_blocks(taken, are_freed=True)
    # The first product of a thread takes the workspace of that thread.
    first: dict[tuple[bool, int], int] = {}
    for one in step.products:
        first.setdefault((one.is_backward, size), one.at)
        if one.is_fused and rule == "apart":
            first.setdefault((one.is_backward, FUSED_WORKSPACE_BYTES), one.at)
    return program.with_blocks([(at, taken) for (_, taken), at in first.items()], are_freed=False)
