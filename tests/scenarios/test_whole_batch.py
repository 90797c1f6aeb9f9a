"""A loss over the whole batch from probe to training: what runs, what is predicted, what is remembered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

import autobatch
from autobatch import DoesNotFitError, Workload
from autobatch.core.options import Options
from autobatch.core.units import KiB
from autobatch.estimates.estimator import estimate_limits
from autobatch.estimates.traced_step import record
from autobatch.rehearsal.rehearsal import ATTEMPT_STEPS, attempt
from autobatch.rehearsal.setup import open_setup
from tests.support.options import as_options
from tests.support.probes import WIDTH, work
from tests.support.step_workloads import WORKLOADS, setup, traced_step
from tests.support.training import INFO_NCE

WIDE = 512


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDE), nn.GELU(), nn.Linear(WIDE, 8))


def contrastive(**fields: Any) -> Workload:
    return work(wide, **{"loss": INFO_NCE, **fields})


@pytest.mark.parametrize(("whole_batch", "precision"), [(None, "fp32"), (30, "bf16")])
def test_what_is_traced_is_what_an_attempt_allocates(whole_batch: int | None, precision: Any) -> None:
    found = WORKLOADS["perceptron"]()
    made = replace(setup(replace(found, loss=INFO_NCE), precision=precision), whole_batch=whole_batch)
    assert record(traced_step(made, steps=ATTEMPT_STEPS), 11).trace == attempt(made, 11).trace


def plan_of(workload: Workload, target_batch: int, budget: int) -> autobatch.Plan:
    return autobatch.plan(workload, target_batch=target_batch, device="cpu", memory_budget=budget)


def test_a_plan_is_for_the_whole_batch_and_by_brute_force_the_largest() -> None:
    target, budget = 128, 800 * KiB
    found = plan_of(contrastive(), target, budget)
    assert found.probe.source == "search"
    size = found.probe.micro_batch
    assert sum(found.micro_batches) == target
    assert found.probe.limited_by == "memory"
    asked = {"target_batch": target, "device": "cpu", "memory_budget": budget}
    made = open_setup(contrastive(), Options(**asked))
    assert made.whole_batch == target
    assert attempt(made, size).attempt.fits
    assert not any(attempt(made, size + more).attempt.fits for more in (1, 2, 10))
    assert plan_of(contrastive(), target, budget).probe.source.startswith("saved")
    assert plan_of(contrastive(), target - 28, budget).probe.source == "search"


@pytest.mark.program
def test_a_batch_whose_loss_alone_does_not_fit_is_told_from_a_micro_batch_that_is_too_large() -> None:
    """300 × 300 logits and what is made of them take 1.4 MiB at any micro-batch."""
    with pytest.raises(DoesNotFitError, match=r"in the loss.* a smaller target batch"):
        plan_of(contrastive(), 300, 1200 * KiB)


@pytest.mark.program
def test_an_estimate_counts_the_whole_batch() -> None:
    def found(**options: Any) -> Any:
        asked = as_options("estimate", profile=["t4"], precision="fp32", micro_batch=8, **options)
        return estimate_limits(contrastive(), asked)

    # Larger than the scratch of cuBLAS, which torch 2.15 gives back before the loss takes its memory.
    alone, small, large = found(), found(target_batch=1600), found(target_batch=2000)
    assert any("assumed to be two micro-batches here" in note for note in alone.notes)
    assert not any("assumed to be two micro-batches here" in note for note in large.notes)
    peaks = [one.estimates[0].peak_allocated_bytes for one in (small, large)]
    # The logits, their logarithms and a gradient, in float32; and scratch of torch's kernels on a GPU.
    assert 2.95 <= (peaks[1] - peaks[0]) / (4 * (2000**2 - 1600**2)) <= 3.5
    assert large.estimates[0].phase == "loss"
