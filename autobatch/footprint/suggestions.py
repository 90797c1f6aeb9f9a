"""Suggestions: changes that let a larger micro-batch fit, each traced, none by a rule of thumb.

A change is applied to the fake copy of the model as training would apply it (`autobatch.step.apply_knobs`),
and the new program is searched under the same budget. The answer depends on the workload alone, not on the
time that tracing takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
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
from autobatch.footprint.fitting import Fitting
from autobatch.footprint.predict import program_on
from autobatch.footprint.program import Untraceable
from autobatch.footprint.tracing.apart import run_in_copies
from autobatch.footprint.tracing.trace_step import Setting
from autobatch.step.apply_knobs import find_blocks
from autobatch.step.gradients import low_precision_parameters
from autobatch.step.optimizers import stand_in_optimizers
from autobatch.workload.contract import Workload

NATIVE_BF16 = (8, 0)
"""First compute capability with matrix units for bf16 (NVIDIA Ampere)."""
Change = Callable[[Setting], Setting]
Trace = Callable[[str, Setting], Footprint]
Names: TypeAlias = tuple[str, ...]
Outcome: TypeAlias = tuple[int, int]
"""The largest micro-batch, 0 if none fits, and its peak (that of 1 if 0)."""
EXPANDABLE = "expandable_segments"
EXPANDABLE_ADVICE = "PYTORCH_ALLOC_CONF=expandable_segments:True"
DEAREST_FIRST = ("gradient_dtype", "bf16", "checkpointing", EXPANDABLE, "fused")
"""Changes in the order in which a combination drops them: the dearest in exactness and time first."""
LEAST_CHANGE = 0.01
"""Share by which the peak must fall if the micro-batch does not grow."""


@dataclass(frozen=True, kw_only=True)
class Spending:
    """A budget, and the sizes to spend it on."""

    allocator: Callable[[bool], Allocator]
    """Returns an empty allocator with the budget; with expandable segments if True, else as the device's."""
    unlimited: Callable[[bool], Allocator]
    """Returns the same without a limit."""
    cap: int
    """The largest micro-batch to try."""
    libraries: Libraries | None = None
    """Of the GPU; None to leave them out."""
    can_expand: bool = True
    """True if segments can be expandable, and are not yet."""

    def outcome(self, step: Footprint, *, expandable: bool = False) -> Outcome:
        """Return what fits of a step.

        Raises:
            Untraceable: its footprint is invalid at a size that was tried.
        """
        program = program_on(step, self.libraries)
        size = Fitting([program], partial(self.allocator, expandable)).largest(self.cap, step.multiple)
        # If a size fits only after the cache is emptied, the peak is the one within the budget.
        peaks = replay(program.at(max(1, size)), (self.allocator if size else self.unlimited)(expandable))
        reserved = peaks.peak_reserved_bytes
        return size, peaks.peak_allocated_bytes if reserved is None else reserved


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
    if spending.can_expand:
        changes[EXPANDABLE] = EXPANDABLE_ADVICE, lambda one: one
    changes |= {name: (advice, change) for name, advice, change in changes_of(setting)}

    @cache
    def traced(names: Names) -> Footprint | None:
        changed = setting
        for name in names:
            changed = changes[name][1](changed)
        try:
            return trace("+".join(sorted(names)), changed) if names else step
        except AutobatchError:
            return None

    @cache
    def outcome(names: Names) -> Outcome | None:
        found = traced(tuple(name for name in names if name != EXPANDABLE))
        try:
            return None if found is None else spending.outcome(found, expandable=EXPANDABLE in names)
        except Untraceable:
            return None

    def suggestion(names: Names, then: Outcome) -> Remedy:
        advice = " and ".join(changes[name][0] for name in names)
        return Remedy(name="+".join(names), advice=advice, micro_batch=then[0], peak_bytes=then[1])

    for name in changes:
        traced((name,) if name != EXPANDABLE else ())  # here, so that each is made once
    now, *each = run_in_copies([partial(outcome, names) for names in [(), *((name,) for name in changes)]])
    if now is None:
        return []
    alone = {name: then for name, then in zip(changes, each, strict=True) if then and _helps(now, then)}
    if now[0] == 0 and not any(size for size, _ in alone.values()):
        together = _together(tuple(changes), alone, outcome)
        return [suggestion(*together)] if together else []
    found = [suggestion((name,), then) for name, then in alone.items()]
    return sorted(found, key=lambda one: (-one.micro_batch, one.peak_bytes))


def _together(
    names: Names, alone: Mapping[str, Outcome], outcome: Callable[[Names], Outcome | None]
) -> tuple[Names, Outcome] | None:
    """Return the changes for a step that no single one makes fit, and their outcome; None if none helps.

    If the changes that lower the peak do not suffice together, all changes are tried: in a step with two
    peaks of nearly the same height, no change alone lowers the peak.

    Args:
        names: all changes.
        alone: the outcome of those that lower the peak.
        outcome: returns the outcome of several changes.
    """
    several = tuple(alone)
    then = outcome(several)
    if then and then[0]:
        return several, then
    everything = outcome(names)
    if everything and everything[0]:
        for name in DEAREST_FIRST:
            rest = tuple(one for one in names if one != name)
            without = outcome(rest)
            if without and without[0]:
                names, everything = rest, without
        return names, everything
    if not alone:
        return None
    best = min(alone, key=lambda name: alone[name][1])
    if then is None or then[1] >= alone[best][1]:
        return (best,), alone[best]
    return several, then


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
    if setting.capability is not None and knobs.get(OPTIMIZER) != "fused" and _may_fuse(setting.workload):
        advice = "a fused optimizer (fused=True)"
        yield "fused", advice, lambda one: replace(one, knobs={**one.knobs, OPTIMIZER: "fused"})


def _may_fuse(workload: Workload) -> bool:
    """Return whether an optimizer of the workload may have a fused implementation that it does not use."""
    made = stand_in_optimizers(workload)
    return not made or any(one.defaults.get("fused", True) in (None, False) for one in made)


def _helps(now: Outcome, then: Outcome) -> bool:
    if then[0] != now[0]:
        return then[0] > now[0]
    return then[1] <= (1 - LEAST_CHANGE) * now[1]
