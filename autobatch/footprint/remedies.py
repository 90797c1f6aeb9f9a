"""What would let a larger micro-batch fit, and how large: every change is traced, none is a rule of thumb.

The change is made to the twin of the model that is traced, the way that training would make it
(`autobatch.step.apply_knobs`), and the new program is searched under the same budget.
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
"""Compute capability from which cards have matrix units for bf16 (NVIDIA Ampere)."""


TRACING_SECONDS = 20.0
"""No further change is traced that would take longer than this in all, by what the last one took."""


LEAST_CHANGE = 0.01
"""Where no larger micro-batch is gained, a peak must fall by this share to be worth a line."""


@dataclass(frozen=True, kw_only=True)
class Spending:
    """What there is to spend, and on how much."""

    allocator: Callable[[bool], Allocator | None]
    """An empty allocator with the budget, which grows in expandable segments or not; ``None``: cannot."""
    unlimited: Callable[[bool], Allocator]
    """The same without the budget."""
    cap: int
    """The largest micro-batch asked for."""
    workspaces: tuple[int, int] | None = None
    """See `autobatch.footprint.predict.predict`."""
    expandable: bool = False
    """Whether segments are expandable as it is."""


def find_remedies(
    setting: Setting,
    step: Footprint,
    spending: Spending,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Remedy]:
    """Say what each change would give, those that give most first.

    Args:
        setting: what the step was traced with.
        step: what it allocates as it is.
        spending: the budget.
        clock: seconds.

    Returns:
        Those that change something; one that cannot be traced, or not in time, is left out.
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
    """The end of a sentence that names what would help; empty where nothing was found."""
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
    """Name, advice, the step as it would be, and whether segments are expandable then."""
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
    """The changes that need a trace of their own, the likeliest to help first."""
    knobs = setting.knobs
    if knobs.get(CHECKPOINTING) != "full" and find_blocks(setting.model):
        advice = "activation checkpointing of the repeated blocks"
        yield "checkpointing", advice, replace(setting, knobs={**knobs, CHECKPOINTING: "full"})
    can_bf16 = setting.capability is None or setting.capability >= NATIVE_BF16
    if setting.precision == "fp32" and can_bf16:
        yield "bf16", "--precision bf16", replace(setting, precision="bf16")
    # On the CPU an optimizer goes parameter by parameter, and a fused one takes no less.
    if setting.capability is not None and knobs.get(OPTIMIZER) != "fused":
        yield "fused", "a fused optimizer (fused=True)", replace(setting, knobs={**knobs, OPTIMIZER: "fused"})


def _outcome(step: Footprint, spending: Spending, *, expandable: bool) -> tuple[int, int] | None:
    """The largest micro-batch, or 0, and the peak that is held against the budget there (at 1, if 0)."""
    if spending.allocator(expandable) is None:
        return None

    def allocator() -> Allocator:
        made = spending.allocator(expandable)
        assert made is not None
        return made

    program: Program = with_workspaces(step, spending.workspaces)
    size = largest(program, allocator, spending.cap, neighbours=0) or 0
    # At a size that fits only after cached memory was given back, the peak is that inside the budget.
    peaks = replay(program.at(max(1, size)), allocator() if size else spending.unlimited(expandable))
    reserved = peaks.peak_reserved_bytes
    return size, peaks.peak_allocated_bytes if reserved is None else reserved


def _helps(now: tuple[int, int], then: tuple[int, int]) -> bool:
    if then[0] != now[0]:
        return then[0] > now[0]
    return then[1] <= (1 - LEAST_CHANGE) * now[1]
