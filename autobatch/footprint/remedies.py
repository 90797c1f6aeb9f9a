"""Remedies: changes that let a larger micro-batch fit, each traced, none by a rule of thumb.

A change is applied to the fake copy of the model as training would apply it (`autobatch.step.apply_knobs`),
and the new program is searched under the same budget.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from autobatch.core.errors import AutobatchError
from autobatch.core.knobs import CHECKPOINTING, OPTIMIZER
from autobatch.core.records import Remedy
from autobatch.core.units import format_bytes
from autobatch.device.allocator.ledger import Allocator
from autobatch.device.allocator.trace import replay
from autobatch.footprint.predict import Footprint, footprint, with_workspaces
from autobatch.footprint.program import Program, Untraceable, largest
from autobatch.footprint.trace_step import Setting
from autobatch.step.apply_knobs import find_blocks

NATIVE_BF16 = (8, 0)
"""First compute capability with matrix units for bf16 (NVIDIA Ampere)."""
TRACING_SECONDS = 20.0
"""Limit of the time for tracing changes. One that would exceed it, judged by the last one, is left out."""
LEAST_CHANGE = 0.01
"""Share by which the peak must fall if the micro-batch does not grow."""


@dataclass(frozen=True, kw_only=True)
class Spending:
    """A budget, and the sizes to spend it on."""

    allocator: Callable[[bool], Allocator | None]
    """Returns an empty allocator with the budget, with expandable segments or not; None if impossible."""
    unlimited: Callable[[bool], Allocator]
    """Returns the same without a limit."""
    cap: int
    """The largest micro-batch to try."""
    workspaces: tuple[int, int] | None = None
    """See `autobatch.footprint.predict.predict`."""
    expandable: bool = False
    """True if segments are expandable already."""


def find_remedies(
    setting: Setting,
    step: Footprint,
    spending: Spending,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Remedy]:
    """Find the changes that help, those that gain most first.

    Args:
        setting: the setting that the step was traced with.
        step: the footprint without any change.
        spending: the budget.
        clock: returns seconds.

    Returns:
        The changes that help. One that cannot be traced, or not in time, is left out.
    """
    found: list[Remedy] = []
    try:
        now = _outcome(step, spending, expandable=spending.expandable)
    except Untraceable:
        return found
    if now is None:
        return found
    for name, advice, changed, expandable in _changes(setting, step, spending, clock):
        try:
            then = _outcome(changed, spending, expandable=expandable)
        except Untraceable:
            continue
        if then is not None and _helps(now, then):
            found.append(Remedy(name=name, advice=advice, micro_batch=then[0], peak_bytes=then[1]))
    return sorted(found, key=lambda one: (-one.micro_batch, one.peak_bytes))


def in_words(remedies: Sequence[Remedy] | None) -> str:
    """Write remedies as the end of a sentence, empty without any."""
    effects = (
        f"{one.advice} (a micro-batch of 1 is predicted to take {format_bytes(one.peak_bytes)} with it)"
        if one.micro_batch == 0
        else f"{one.advice} (a micro-batch of {one.micro_batch:,} is predicted to fit with it)"
        for one in remedies or ()
    )
    return "".join(f", {effect}" for effect in effects)


def _changes(
    setting: Setting, step: Footprint, spending: Spending, clock: Callable[[], float]
) -> Iterator[tuple[str, str, Footprint, bool]]:
    """Yield name, advice, changed footprint, and True if its segments are expandable."""
    if not spending.expandable:
        yield "expandable_segments", "PYTORCH_ALLOC_CONF=expandable_segments:True", step, True
    left = TRACING_SECONDS
    last = step.seconds
    for name, advice, changed in _settings(setting):
        if last > left:
            return
        start = clock()
        try:
            traced = footprint(changed, tested=True)
        except AutobatchError:
            continue
        finally:
            last = clock() - start
            left -= last
        yield name, advice, traced, spending.expandable


def _settings(setting: Setting) -> Iterator[tuple[str, str, Setting]]:
    """Yield the changes that need a trace of their own, the most promising first."""
    knobs = setting.knobs
    if knobs.get(CHECKPOINTING) != "full" and find_blocks(setting.model):
        advice = "activation checkpointing of the repeated blocks"
        yield "checkpointing", advice, replace(setting, knobs={**knobs, CHECKPOINTING: "full"})
    can_bf16 = setting.capability is None or setting.capability >= NATIVE_BF16
    if setting.precision == "fp32" and can_bf16:
        yield "bf16", "--precision bf16", replace(setting, precision="bf16")
    # On the CPU an optimizer updates one parameter at a time, and a fused one saves nothing.
    if setting.capability is not None and knobs.get(OPTIMIZER) != "fused":
        yield "fused", "a fused optimizer (fused=True)", replace(setting, knobs={**knobs, OPTIMIZER: "fused"})


def _outcome(step: Footprint, spending: Spending, *, expandable: bool) -> tuple[int, int] | None:
    """Return the largest micro-batch, 0 if none fits, and its peak (that of 1 if 0)."""
    if spending.allocator(expandable) is None:
        return None

    def allocator() -> Allocator:
        made = spending.allocator(expandable)
        assert made is not None
        return made

    program: Program = with_workspaces(step, spending.workspaces)
    size = largest(program, allocator, spending.cap, neighbours=0) or 0
    # If a size fits only after the cache is emptied, the peak is the one within the budget.
    peaks = replay(program.at(max(1, size)), allocator() if size else spending.unlimited(expandable))
    reserved = peaks.peak_reserved_bytes
    return size, peaks.peak_allocated_bytes if reserved is None else reserved


def _helps(now: tuple[int, int], then: tuple[int, int]) -> bool:
    if then[0] != now[0]:
        return then[0] > now[0]
    return then[1] <= (1 - LEAST_CHANGE) * now[1]
