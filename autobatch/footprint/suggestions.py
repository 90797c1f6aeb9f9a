"""Suggestions: changes that let a larger micro-batch fit, each traced, none by a rule of thumb.

A change is applied to the fake copy of the model as training would apply it (`autobatch.step.apply_knobs`),
and the new program is searched under the same budget. The answer depends on the workload alone, not on the
time that tracing takes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from autobatch.core.errors import AutobatchError
from autobatch.core.knobs import CHECKPOINTING, OPTIMIZER
from autobatch.core.records import Remedy
from autobatch.core.units import format_bytes
from autobatch.device.allocator.ledger import Allocator
from autobatch.device.allocator.trace import replay
from autobatch.device.profiles import Libraries
from autobatch.footprint.depth import deep_footprint
from autobatch.footprint.fit import Footprint
from autobatch.footprint.predict import largest_on, program_on
from autobatch.footprint.program import Polynomial, Program, Untraceable
from autobatch.footprint.tracing.trace_step import Setting
from autobatch.step.apply_knobs import find_blocks
from autobatch.step.gradients import low_precision_parameters

NATIVE_BF16 = (8, 0)
"""First compute capability with matrix units for bf16 (NVIDIA Ampere)."""
Change = Callable[[Setting], Setting]
Trace = Callable[[str, Setting], Footprint]
_Outcome: TypeAlias = tuple[int, int]
"""The largest micro-batch, 0 if none fits, and its peak (that of 1 if 0)."""
OF_THE_OPTIMIZER = frozenset({"fused"})
"""Changes that save memory only within the phase of the optimizer."""
EXPANDABLE = "expandable_segments"
EXPANDABLE_ADVICE = "PYTORCH_ALLOC_CONF=expandable_segments:True"
DEAREST_FIRST = ("gradient_dtype", "bf16", "checkpointing", EXPANDABLE, "fused")
"""Changes in the order in which a combination drops them: the dearest in exactness and time first."""
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
    libraries: Libraries | None = None
    """Of the GPU; None to leave them out."""
    expandable: bool = False
    """True if segments are expandable already."""


def trace_change(name: str, changed: Setting) -> Footprint:
    """Trace a step with a change. The name of the change lets others keep what was traced."""
    del name
    return deep_footprint(changed).step


def find_suggestions(
    setting: Setting, step: Footprint, spending: Spending, *, trace: Trace = trace_change
) -> list[Remedy]:
    """Find the changes that help, those that gain most first.

    Args:
        setting: the setting that the step was traced with.
        step: the footprint without any change.
        spending: the budget.
        trace: traces a step with a change, given its name and its setting.

    Returns:
        The changes with which more fits. If nothing fits with any of them alone, the only suggestion is
        several together: those that lower the peak, else the fewest of all that suffice, else those that
        lower it without sufficing. A change that cannot be traced is left out.
    """
    changes: dict[str, tuple[str, Change]] = {}
    if not spending.expandable and spending.allocator(True) is not None:
        changes[EXPANDABLE] = EXPANDABLE_ADVICE, lambda one: one
    changes |= {name: (advice, change) for name, advice, change in changes_of(setting)}

    def outcome(names: Sequence[str]) -> _Outcome | None:
        traced = [name for name in changes if name in names and name != EXPANDABLE]
        changed = setting
        for name in traced:
            changed = changes[name][1](changed)
        try:
            found = trace("+".join(sorted(traced)), changed) if traced else step
        except AutobatchError:
            return None
        return _outcome(found, spending, expandable=spending.expandable or EXPANDABLE in names)

    def suggestion(names: Sequence[str], then: _Outcome) -> Remedy:
        advice = " and ".join(changes[name][0] for name in names)
        return Remedy(name="+".join(names), advice=advice, micro_batch=then[0], peak_bytes=then[1])

    now = outcome([])
    if now is None:
        return []
    found: dict[str, _Outcome] = {}
    for name in changes:
        if name in OF_THE_OPTIMIZER and not _may_help(now, step, spending):
            continue
        then = outcome([name])
        if then is not None and _helps(now, then):
            found[name] = then
    if now[0] == 0 and not any(size for size, _ in found.values()):
        several = _together(list(changes), found, outcome)
        return [] if several is None else [suggestion(*several)]
    alone = [suggestion([name], then) for name, then in found.items()]
    return sorted(alone, key=lambda one: (-one.micro_batch, one.peak_bytes))


def _together(
    names: list[str],
    found: Mapping[str, _Outcome],
    outcome: Callable[[Sequence[str]], _Outcome | None],
) -> tuple[list[str], _Outcome] | None:
    """Return the changes for a step that no single one makes fit, and their outcome; None if none helps.

    If the changes that lower the peak do not suffice together, all changes are tried: in a step with two
    peaks of nearly the same height, no change alone lowers the peak. Of these, the fewest that suffice are
    returned.

    Args:
        names: all changes.
        found: those that lower the peak, with their outcome.
        outcome: returns the outcome of several changes.
    """
    several = list(found)
    then = outcome(several) if len(several) > 1 else None
    if (then is None or then[0] == 0) and set(several) < set(names):
        fewest = _fewest(names, outcome)
        if fewest is not None:
            return fewest
    if not found:
        return None
    best = min(found, key=lambda name: found[name][1])
    if then is None or (then[0] == 0 and then[1] >= found[best][1]):
        return [best], found[best]
    return several, then


def _fewest(
    names: list[str], outcome: Callable[[Sequence[str]], _Outcome | None]
) -> tuple[list[str], _Outcome] | None:
    """Return the changes without those that are not needed, and their outcome; None if all do not suffice."""
    then = outcome(names)
    if then is None or then[0] == 0:
        return None
    for name in [one for one in DEAREST_FIRST if one in names]:
        rest = [one for one in names if one != name]
        without = outcome(rest) if len(rest) > 1 else None  # one alone was tried
        if without is not None and without[0]:
            names, then = rest, without
    return names, then


def in_words(suggestions: Sequence[Remedy] | None) -> str:
    """Write suggestions as the end of a sentence, empty without any."""
    effects = (
        f"{one.advice} (not enough: a micro-batch of 1 is predicted to take "
        f"{format_bytes(one.peak_bytes)} with it)"
        if one.micro_batch == 0
        else f"{one.advice} (a micro-batch of {one.micro_batch:,} is predicted to fit with it)"
        for one in suggestions or ()
    )
    return "".join(f", {effect}" for effect in effects)


def _may_help(now: _Outcome, step: Footprint, spending: Spending) -> bool:
    """Return whether it would help if the optimizer took nothing beside its state, which costs no trace."""
    bare = replace(step, program=_without_temporaries(step.program, "optimizer"))
    then = _outcome(bare, spending, expandable=spending.expandable)
    return then is None or _helps(now, then)


def _without_temporaries(program: Program, phase: str) -> Program:
    """Return a program in which blocks that are taken and freed within one phase have no bytes."""
    starts = [at for at, _ in program.marks]
    inside = {at for at, name in program.marks if name == phase}
    taken: dict[int, int] = {}
    nothing: set[int] = set()
    for index, (block, rule) in enumerate(program.events):
        start = starts[max(0, bisect_right(starts, index) - 1)] if starts else -1
        if rule is not None:
            taken[block] = start
        elif taken.get(block) == start and start in inside:
            nothing.add(block)
    events = tuple(
        (block, Polynomial(0) if rule is not None and block in nothing else rule)
        for block, rule in program.events
    )
    return Program(events, program.marks)


def changes_of(setting: Setting) -> Iterator[tuple[str, str, Change]]:
    """Yield name, advice and effect of the changes that need a trace of their own."""
    knobs = setting.knobs
    if knobs.get(CHECKPOINTING) != "full" and find_blocks(setting.model):
        advice = "activation checkpointing of the repeated blocks"
        yield "checkpointing", advice, lambda one: replace(one, knobs={**one.knobs, CHECKPOINTING: "full"})
    can_bf16 = setting.capability is None or setting.capability >= NATIVE_BF16
    if setting.precision == "fp32" and can_bf16:
        yield "bf16", "--precision bf16", lambda one: replace(one, precision="bf16")
    if setting.gradient_dtype == "fp32" and low_precision_parameters(setting.model):
        advice = "--gradient-dtype weights, which rounds the gradient after each micro-batch"
        yield "gradient_dtype", advice, lambda one: replace(one, gradient_dtype="weights")
    # On the CPU an optimizer updates one parameter at a time, and a fused one saves nothing.
    if setting.capability is not None and knobs.get(OPTIMIZER) != "fused":
        advice = "a fused optimizer (fused=True)"
        yield "fused", advice, lambda one: replace(one, knobs={**one.knobs, OPTIMIZER: "fused"})


def _outcome(step: Footprint, spending: Spending, *, expandable: bool) -> _Outcome | None:
    """Return the largest micro-batch, 0 if none fits, and its peak (that of 1 if 0).

    Returns:
        None if the allocator cannot be so, or the footprint is invalid at a size that was tried.
    """
    if spending.allocator(expandable) is None:
        return None

    def allocator() -> Allocator:
        made = spending.allocator(expandable)
        assert made is not None
        return made

    program: Program = program_on(step, spending.libraries)
    try:
        size = largest_on(step, program, allocator, spending.cap)
        # If a size fits only after the cache is emptied, the peak is the one within the budget.
        peaks = replay(program.at(max(1, size)), allocator() if size else spending.unlimited(expandable))
    except Untraceable:
        return None
    reserved = peaks.peak_reserved_bytes
    return size, peaks.peak_allocated_bytes if reserved is None else reserved


def _helps(now: _Outcome, then: _Outcome) -> bool:
    if then[0] != now[0]:
        return then[0] > now[0]
    return then[1] <= (1 - LEAST_CHANGE) * now[1]
