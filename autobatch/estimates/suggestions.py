"""Suggestions: changes that let a larger micro-batch fit, each traced alone, none by a rule of thumb.

A change is applied to the fake copy of the model as training would apply it (`autobatch.step.apply_knobs`),
and the new footprint is searched under the same budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from autobatch.core.knobs import CHECKPOINTING, COMPILE, OPTIMIZER
from autobatch.core.records import Remedy
from autobatch.core.units import format_bytes
from autobatch.estimates.copies import run_in_copies
from autobatch.estimates.footprints import Footprint, footprint, footprints
from autobatch.estimates.gpus import Budget
from autobatch.estimates.policy import AMPERE
from autobatch.estimates.traced_step import TracedStep
from autobatch.rehearsal.setup import Setup, describe_setup
from autobatch.step.apply_knobs import recomputable_blocks
from autobatch.step.gradients import low_precision_parameters
from autobatch.step.optimizers import stand_in_optimizers

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
    # A compiled model is traced as its module.
    knobs = {name: value for name, value in setup.knobs.items() if name != COMPILE}
    step = TracedStep(
        setup=replace(setup, knobs=knobs),
        capability=setup.device.compute_capability,
        sharding=partial(nullcontext, setup.sharding),
    )
    device = info.device
    budget = Budget(device.name, device.budget_bytes, device.budget_source, info.allocator, info.samples)
    return helpful(footprint(step), [*changes_of(step)], budget)


def helpful(plain: Footprint, changes: Sequence[Change], budget: Budget) -> list[Remedy]:
    """Return the changes with which more fits in a budget, those that gain most first.

    One that cannot be traced is left out. If nothing fits with any change, those that lower the peak are
    returned, with a micro-batch of 0.
    """
    traced = zip(changes, footprints([change.step for change in changes]), strict=True)
    tried = [
        (change.name, change.advice, budget, found)
        for change, found in traced
        if isinstance(found, Footprint)
    ]
    if budget.config is not None and not budget.config.expandable_segments:
        expandable = budget._replace(config=replace(budget.config, expandable_segments=True))
        tried.append((EXPANDABLE, EXPANDABLE_ADVICE, expandable, plain))
    asked = [partial(of.largest, step) for _, _, of, step in tried]
    (now, peak), *largest = run_in_copies([partial(budget.largest, plain), *asked])
    remedies = [
        Remedy(name=name, advice=advice, micro_batch=size, peak_bytes=then)
        for (name, advice, _, _), (size, then) in zip(tried, largest, strict=True)
        if size > now or (size == now and then <= (1 - LEAST_CHANGE) * peak)
    ]
    return sorted(remedies, key=lambda remedy: (-remedy.micro_batch, remedy.peak_bytes))


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
    setup, knobs = step.setup, step.setup.knobs
    if knobs.get(CHECKPOINTING) != "full" and recomputable_blocks(setup.model):
        advice = "activation checkpointing of the repeated blocks"
        yield Change("checkpointing", advice, step.changed(knobs={**knobs, CHECKPOINTING: "full"}))
    if setup.precision == "fp32" and (step.capability is None or step.capability >= AMPERE):
        yield Change("bf16", "--precision bf16", step.changed(precision="bf16"))
    if setup.gradient_dtype == "fp32" and low_precision_parameters(setup.model):
        advice = "--gradient-dtype weights, which rounds the gradient after each micro-batch"
        yield Change("gradient_dtype", advice, step.changed(gradient_dtype="weights"))
    # On the CPU an optimizer updates one parameter at a time, and a fused one saves nothing.
    if step.capability is not None and knobs.get(OPTIMIZER) != "fused":
        made = stand_in_optimizers(setup.workload)
        if not made or any(one.defaults.get("fused", True) in (None, False) for one in made):
            advice = "a fused optimizer (fused=True)"
            yield Change("fused", advice, step.changed(knobs={**knobs, OPTIMIZER: "fused"}))
