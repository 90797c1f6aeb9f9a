"""Predictions and suggestions, against real runs on the CPU and workloads that are written that way."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from autobatch.core.units import MiB
from autobatch.device.allocator import Allocator, CachingAllocator
from autobatch.device.trace import replay
from autobatch.estimates.estimator import Change, changes_of, helpful, suggest
from autobatch.estimates.gpus import Budget
from autobatch.estimates.traced_step import MARGIN, footprint
from autobatch.rehearsal.rehearsal import attempt
from autobatch.rehearsal.setup import Setup, with_knobs
from tests.support.step_workloads import WORKLOADS, setup, traced_step, transformer

BUDGET = 30 * MiB


def budget_of(size: int, cap: int, allocator: Any = CachingAllocator) -> Budget:
    return Budget("gpu", size, "", allocator, cap)


@pytest.mark.parametrize("name", ["perceptron", "convolutions", "transformer"])
def test_the_largest_on_the_cpu_is_the_largest_that_runs(name) -> None:
    step = footprint(traced_step(setup(WORKLOADS[name]())))
    budget = 100 + replay(step.program.at(23), Allocator()).peak_allocated_bytes
    size, peak = budget_of(budget, 1000, Allocator).largest(step)
    made = setup(WORKLOADS[name](), budget=budget)
    ran = attempt(made, size).attempt
    assert (size >= 23, ran.fits, ran.peak_allocated_bytes) == (True, True, peak)
    assert not attempt(made, size + 1).attempt.fits


def test_a_prediction_is_an_interval_around_its_answer() -> None:
    """The upper end is that of the live bytes, the lower end that of a budget less the margin."""
    step = footprint(traced_step(setup(WORKLOADS["transformer"](), precision="bf16"), capability=(8, 9)))
    budget = budget_of(256 * MiB, 10**6)
    found = budget.predict(step)
    assert found.fits
    assert 0 < found.micro_batch_low < found.micro_batch <= found.micro_batch_high
    assert found.peak_allocated_bytes <= found.peak_reserved_bytes <= 256 * MiB
    peaks = [
        replay(step.program.at(m), Allocator()).peak_allocated_bytes
        for m in (found.micro_batch_high, found.micro_batch_high + 1)
    ]
    assert peaks[0] <= 256 * MiB < peaks[1]
    less = budget_of(int(256 * MiB * (1 - MARGIN)), 10**6)
    assert found.micro_batch_low == less.largest(step)[0]
    few = budget._replace(cap=7).predict(step)
    assert few.micro_batch_low == few.micro_batch == few.micro_batch_high == 7
    asked = budget.predict(step, 10**5)
    assert (asked.fits, asked.peak_reserved_bytes > 256 * MiB) == (False, True)
    none = budget._replace(budget_bytes=MiB).predict(step)
    assert (none.micro_batch, none.fits, none.peak_allocated_bytes > 0) == (0, False, True)


def deep(recompute: bool = False, fused: bool | None = None):
    """Return a workload deep enough that checkpointing helps."""
    fusing = partial(torch.optim.AdamW, fused=fused)
    return transformer(lambda parameters, rate: fusing(parameters, lr=rate), depth=2, recompute=recompute)


@pytest.mark.program
def test_a_suggestion_equals_a_workload_written_that_way() -> None:
    one = traced_step(setup(deep()), capability=(8, 0))
    step, budget = footprint(one), budget_of(BUDGET, 5000)
    found = helpful(step, [*changes_of(one)], budget)
    assert [r.micro_batch for r in found] == sorted((r.micro_batch for r in found), reverse=True)
    now = budget.largest(step)[0]

    def limit(made: Setup) -> tuple[int, int]:
        return budget.largest(footprint(traced_step(made, capability=(8, 0))))

    expandable = partial(CachingAllocator, expandable=True)
    known = {
        "checkpointing": limit(setup(deep(recompute=True))),
        "bf16": limit(setup(deep(), precision="bf16")),
        "fused": limit(setup(deep(fused=True))),
        "expandable_segments": budget._replace(new_allocator=expandable).largest(step),
    }
    named = {remedy.name: (remedy.micro_batch, remedy.peak_bytes) for remedy in found}
    assert named["checkpointing"][0] > 1.2 * now
    assert all(known[name] == named[name] if name in named else known[name][0] <= now for name in known)


@pytest.mark.program
def test_suggestions_are_true_of_the_setup_that_was_probed() -> None:
    """The oracle is attempts with the change that a suggestion names."""
    one = setup(transformer(depth=3), budget=MiB * 3 // 4)
    assert not attempt(one, 12).attempt.fits
    found = {remedy.name: remedy.micro_batch for remedy in suggest(one)}
    assert not {"fused", "expandable_segments"} & {*found}
    for name, knobs in {"checkpointing": {"checkpointing": "full"}, "bf16": {"precision": "bf16"}}.items():
        changed = with_knobs(one, knobs)
        assert found[name] >= 12
        assert attempt(changed, found[name]).attempt.fits
        assert not attempt(changed, found[name] + 1).attempt.fits
    assert suggest(setup(WORKLOADS["perceptron"](), budget=10 * MiB)) == []


def test_what_a_gpu_or_a_trace_cannot_do_is_left_out() -> None:
    one = traced_step(setup(deep()), capability=(8, 0))
    old = traced_step(setup(deep()), capability=(7, 0))
    assert {c.name for c in changes_of(one)} - {c.name for c in changes_of(old)} == {"bf16"}
    wrong = one.changed(workload=replace(transformer(), loss=lambda model, ids: model(ids)))
    untraced = [Change("fused", "a fused optimizer", wrong)]
    found = helpful(footprint(one), untraced, budget_of(BUDGET, 5000))
    assert {remedy.name for remedy in found} <= {"expandable_segments"}
