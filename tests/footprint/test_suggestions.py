"""Suggestions, against workloads that are written that way and against real runs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from autobatch.core.errors import AutobatchError
from autobatch.core.records import Remedy
from autobatch.core.units import MiB
from autobatch.device.allocator.caching import AllocatorConfig, CachingAllocator
from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.device.allocator.trace import replay
from autobatch.footprint import suggestions
from autobatch.footprint.fit import footprint
from autobatch.footprint.predict import Fitting
from autobatch.footprint.program import Polynomial
from autobatch.footprint.suggestions import Spending, find_suggestions
from autobatch.rehearsal.attempt import ATTEMPT_STEPS, attempt
from tests.support.step_workloads import WORKLOADS, Tokens, Transformer, make, setting, setup, token_loss

BUDGET = 30 * MiB


def deep(recompute=False, fused=None):
    """Return a workload deep enough that checkpointing helps."""
    return make(
        partial(Transformer, depth=2, recompute=recompute),
        data=Tokens(),
        loss=token_loss,
        optimizer=lambda parameters, rate: torch.optim.AdamW(parameters, lr=rate, fused=fused),
    )


@pytest.fixture(scope="module")
def traced():
    one = setting(setup(deep()), capability=(8, 0))
    return one, footprint(one)


def on_gpu(limit, cap=5000):
    def allocator(budget, expandable):
        return CachingAllocator(budget, AllocatorConfig(expandable_segments=expandable))

    return Spending(allocator=partial(allocator, limit), unlimited=partial(allocator, None), cap=cap)


def on_cpu(limit, cap=5000):
    return Spending(
        allocator=lambda _: CountingAllocator(limit),
        unlimited=lambda _: CountingAllocator(),
        cap=cap,
        can_expand=False,
    )


def by_name(found: list[Remedy]) -> dict[str, Remedy]:
    return {one.name: one for one in found}


@pytest.mark.program
def test_a_suggestion_equals_a_workload_written_that_way(traced):
    one, step = traced
    found = find_suggestions(one, step, on_gpu(BUDGET))
    assert [r.micro_batch for r in found] == sorted((r.micro_batch for r in found), reverse=True)
    now = Fitting([step.program], lambda: CachingAllocator(BUDGET)).largest(5000)
    assert all(r.micro_batch >= now for r in found)

    def limit(other, config=None):
        program = footprint(other).program
        best = Fitting([program], lambda: CachingAllocator(BUDGET, config)).largest(5000)
        return best, replay(program.at(best), CachingAllocator(BUDGET, config)).peak_reserved_bytes

    known = {
        "checkpointing": limit(setting(setup(deep(recompute=True)), capability=(8, 0))),
        "bf16": limit(setting(setup(deep(), precision="bf16"), capability=(8, 0))),
        "fused": limit(setting(setup(deep(fused=True)), capability=(8, 0))),
        "expandable_segments": limit(one, AllocatorConfig(expandable_segments=True)),
    }
    named = by_name(found)
    assert named["checkpointing"].micro_batch > 1.2 * now
    for name, remedy in named.items():
        assert (remedy.micro_batch, remedy.peak_bytes) == known[name], name
    for name in set(known) - set(named):
        assert known[name][0] <= now, name


@pytest.mark.program
def test_a_suggestion_on_the_cpu_really_runs():
    real = setup(deep(), budget=8 * MiB)
    one = setting(real, steps=ATTEMPT_STEPS)
    found = by_name(find_suggestions(one, footprint(one), on_cpu(8 * MiB)))
    assert "fused" not in found
    assert "expandable_segments" not in found
    changed = replace(real, knobs={"checkpointing": "full"})
    size = found["checkpointing"].micro_batch
    ran = attempt(changed, size).attempt
    assert ran.fits
    assert ran.peak_allocated_bytes == found["checkpointing"].peak_bytes
    assert not attempt(changed, size + 1).attempt.fits
    assert not attempt(real, size).attempt.fits


def test_what_a_gpu_or_a_trace_cannot_do_is_left_out(traced):
    one, step = traced
    names = {name for name, _, _ in suggestions.changes_of(replace(one, capability=(7, 0)))}
    assert {name for name, _, _ in suggestions.changes_of(one)} - names == {"bf16"}

    def fail(*_):
        raise AutobatchError("cannot be traced")

    assert set(by_name(find_suggestions(one, step, on_gpu(BUDGET), trace=fail))) <= {"expandable_segments"}


def in_quarters(step, quarters):
    """Return the footprint with so many quarters of each block."""
    events = [
        (
            block,
            rule
            if not isinstance(rule, Polynomial)
            else Polynomial(*(quarters * part for part in rule[:3]), 4 * rule.denominator),
        )
        for block, rule in step.program.events
    ]
    return replace(step, program=replace(step.program, events=tuple(events)))


def test_changes_are_combined_if_none_suffices_alone():
    workload = make(lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 8).bfloat16()))
    one = replace(setting(setup(WORKLOADS["perceptron"]())), model=workload.model())
    step = footprint(setting(setup(WORKLOADS["perceptron"]())))
    quarters = {"bf16": 3, "gradient_dtype": 2, "bf16+gradient_dtype": 1}
    asked = []

    def trace(name, changed):
        asked.append((name, changed.precision, changed.gradient_dtype))
        return in_quarters(step, quarters[name])

    peak = replay(step.program.at(1), CountingAllocator()).peak_allocated_bytes
    [found] = find_suggestions(one, step, on_cpu(0.4 * peak), trace=trace)
    assert (found.name, found.micro_batch > 0) == ("bf16+gradient_dtype", True)
    assert asked[-1] == ("bf16+gradient_dtype", "bf16", "weights")
    [found] = find_suggestions(one, step, on_cpu(0.2 * peak), trace=trace)
    assert (found.name, found.micro_batch) == ("bf16+gradient_dtype", 0)
    some = find_suggestions(one, step, on_cpu(0.6 * peak), trace=trace)
    assert [(remedy.name, remedy.micro_batch > 0) for remedy in some] == [
        ("gradient_dtype", True),
        ("bf16", False),
    ]


def test_two_peaks_of_one_height_are_lowered_together(traced):
    """Neither change alone lowers the peak of a step; what the two do not need is left out."""
    one, step = traced
    peak = replay(step.program.at(1), CountingAllocator()).peak_allocated_bytes

    def trace(name, _):
        return in_quarters(step, 1 if {"checkpointing", "fused"} <= set(name.split("+")) else 4)

    [found] = find_suggestions(one, step, on_cpu(0.5 * peak), trace=trace)
    assert (found.name, found.micro_batch > 0) == ("checkpointing+fused", True)
    assert (
        found.advice == "activation checkpointing of the repeated blocks and a fused optimizer (fused=True)"
    )
    assert find_suggestions(one, step, on_cpu(0.1 * peak), trace=trace) == []
