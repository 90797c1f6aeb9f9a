"""Suggestions: changes that let a larger micro-batch fit, each traced alone, none by a rule of thumb.

A change is applied to the fake copy of the model as training would apply it (`autobatch.step.apply_knobs`),
and the new footprint is searched under the same budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from autobatch.core.errors import AutobatchError
from autobatch.core.knobs import CHECKPOINTING, COMPILE, OPTIMIZER
from autobatch.core.records import Remedy
from autobatch.core.units import format_bytes
from autobatch.device.allocator import Allocator
from autobatch.estimates.copies import run_in_copies
from autobatch.estimates.footprints import Footprint, footprint, footprints
from autobatch.estimates.gpus import Spending
from autobatch.estimates.traced_step import TracedStep
from autobatch.rehearsal.setup import Setup, describe_setup
from autobatch.step.apply_knobs import recomputable_blocks
from autobatch.step.gradients import low_precision_parameters
from autobatch.step.train_state import stand_in_optimizers
from autobatch.workload.contract import Workload

NATIVE_BF16 = (8, 0)
"""First compute capability with matrix units for bf16 (NVIDIA Ampere)."""
EXPANDABLE = "expandable_segments"
EXPANDABLE_ADVICE = "PYTORCH_ALLOC_CONF=expandable_segments:True"
LEAST_CHANGE = 0.01
"""Share by which the peak must fall if the micro-batch does not grow."""


class Change(NamedTuple):
    """A change that may let more fit."""

    name: str
    advice: str
    """Instruction, in words."""
    step: TracedStep
    """The step with the change."""


def suggest(setup: Setup) -> list[Remedy]:
    """Return the changes that let more of a setup fit in the budget of its device; see `helpful`.

    Raises:
        AutobatchError: the step cannot be traced.
    """
    info = describe_setup(setup)
    step = TracedStep(
        workload=setup.workload,
        model=setup.model,
        batch_of=setup.worst_case.batch,
        precision=setup.precision,
        gradient_dtype=setup.gradient_dtype,
        capability=setup.device.compute_capability,
        samples=setup.whole_batch,
        max_grad_norm=setup.max_grad_norm,
        ema=setup.ema,
        sharding=partial(nullcontext, setup.sharding),
        keeps_batches=setup.keeps_batches,
        # A compiled model is traced as its module.
        knobs={name: value for name, value in setup.knobs.items() if name != COMPILE},
    )
    new_allocator: Any = info.new_allocator

    def allocator(limit: int | None, expandable: bool) -> Allocator:
        made: Allocator = new_allocator(limit, expandable=True) if expandable else new_allocator(limit)
        return made

    can_expand = new_allocator(None).is_expandable is False
    spending = Spending(info.device.budget_bytes, allocator, info.samples, can_expand)
    return helpful(footprint(step), [*changes_of(step)], spending)


def helpful(plain: Footprint, changes: Sequence[Change], spending: Spending) -> list[Remedy]:
    """Return the changes with which more fits in a budget, those that gain most first.

    One that cannot be traced is left out. If nothing fits with any change, those that lower the peak are
    returned, with a micro-batch of 0.
    """
    traced = footprints([change.step for change in changes])
    tried = [
        (change.name, change.advice, found, False) for change, found in zip(changes, traced, strict=True)
    ]
    if spending.can_expand:
        tried.append((EXPANDABLE, EXPANDABLE_ADVICE, plain, True))
    asked = [partial(_outcome, spending, found, is_expandable) for _, _, found, is_expandable in tried]
    now, *outcomes = run_in_copies([partial(_outcome, spending, plain, False), *asked])
    remedies = [
        Remedy(name=name, advice=advice, micro_batch=then[0], peak_bytes=then[1])
        for (name, advice, _, _), then in zip(tried, outcomes, strict=True)
        if now is not None and then is not None and _helps(now, then)
    ]
    return sorted(remedies, key=lambda remedy: (-remedy.micro_batch, remedy.peak_bytes))


def _outcome(
    spending: Spending, step: Footprint | AutobatchError, is_expandable: bool
) -> tuple[int, int] | None:
    return None if isinstance(step, AutobatchError) else spending.largest(step, expandable=is_expandable)


def _helps(now: tuple[int, int], then: tuple[int, int]) -> bool:
    return then[0] > now[0] or (then[0] == now[0] and then[1] <= (1 - LEAST_CHANGE) * now[1])


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


def changes_of(step: TracedStep) -> Iterator[Change]:
    """Yield the changes that need a trace of their own."""
    knobs = step.knobs
    if knobs.get(CHECKPOINTING) != "full" and recomputable_blocks(step.model):
        advice = "activation checkpointing of the repeated blocks"
        yield Change("checkpointing", advice, replace(step, knobs={**knobs, CHECKPOINTING: "full"}))
    can_bf16 = step.capability is None or step.capability >= NATIVE_BF16
    if step.precision == "fp32" and can_bf16:
        yield Change("bf16", "--precision bf16", replace(step, precision="bf16"))
    if step.gradient_dtype == "fp32" and low_precision_parameters(step.model):
        advice = "--gradient-dtype weights, which rounds the gradient after each micro-batch"
        yield Change("gradient_dtype", advice, replace(step, gradient_dtype="weights"))
    # On the CPU an optimizer updates one parameter at a time, and a fused one saves nothing.
    if step.capability is not None and knobs.get(OPTIMIZER) != "fused" and _may_fuse(step.workload):
        advice = "a fused optimizer (fused=True)"
        yield Change("fused", advice, replace(step, knobs={**knobs, OPTIMIZER: "fused"}))


def _may_fuse(workload: Workload) -> bool:
    """Return whether an optimizer of the workload may have a fused implementation that it does not use."""
    made = stand_in_optimizers(workload)
    return not made or any(one.defaults.get("fused", True) in (None, False) for one in made)
