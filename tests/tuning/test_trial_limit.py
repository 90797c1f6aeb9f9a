"""The largest micro-batch of a configuration, against attempts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import autobatch
from autobatch.device.allocator.caching import CachingAllocator
from autobatch.planning import micro_batches
from autobatch.setup.attempt import attempt
from autobatch.setup.setup import with_knobs
from autobatch.tuning import trial_limit
from autobatch.tuning.configuration import MEMORY
from autobatch.tuning.trial_limit import micro_batch_of
from tests.support.trials import (
    LOADING,
    changed,
    deep_layers,
    deep_rows,
    loading_runner,
    make_runner,
    signed,
    simulated_gpu,
    trial_setup,
    trial_workload,
)


def test_a_micro_batch_is_halved_as_often_as_asked() -> None:
    assert [micro_batch_of(6, 64, {"micro_batch_shift": shift}) for shift in range(4)] == [6, 3, 1, 1]


def test_a_configuration_that_needs_less_memory_gets_a_larger_micro_batch_that_fits() -> None:
    made = trial_setup(budget=400_000, train_data=deep_rows(512))
    limit = autobatch.probe(
        trial_workload(train_data=deep_rows(512)), device="cpu", memory_budget=400_000
    ).micro_batch
    opened = make_runner(made, limit=limit, cap=512, samples=512)
    found = opened.measure(changed(checkpointing="full"))
    assert found.micro_batch > 1.5 * limit
    assert opened.confirm_fits(changed(checkpointing="full")) is None
    assert attempt(with_knobs(made, changed(checkpointing="full")), found.micro_batch).attempt.fits


def test_a_prediction_far_from_the_limit_is_not_confirmed_by_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []
    monkeypatch.setattr(trial_limit, "attempt", lambda *given: attempts.append(given) or attempt(*given))
    assert make_runner(trial_setup()).measure(changed(optimizer="foreach")).feasible
    assert not attempts
    tight = trial_setup(budget=60_000)
    refused = make_runner(tight, limit=1).measure(changed(optimizer="foreach"))
    assert (refused.failure or "").startswith("not even a micro-batch of 1 is predicted to fit in")
    assert refused.constraints[MEMORY] > 0
    assert not attempts


def test_without_a_prediction_runs_find_a_size_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_limit, "trace_footprint", lambda _: None)
    made = trial_setup(budget=400_000, train_data=deep_rows(512))
    found = make_runner(made, limit=8, cap=512, samples=512).measure(changed(optimizer="fused"))
    assert found.feasible
    assert attempt(made, found.micro_batch).attempt.fits


@pytest.mark.program
def test_expandable_segments_have_their_own_limit(tmp_path: Path, allocators: list[CachingAllocator]) -> None:
    """The oracle is attempts on a GPU whose segments are expandable from the start."""
    workload = signed(set(), model=deep_layers)
    device = simulated_gpu(tmp_path, "60MiB")
    runner = loading_runner(workload, device, cap=4096, samples=4096, limit=16)
    values = {**LOADING, "expandable_segments": True}
    limit = runner.limits.limit(values)
    assert isinstance(limit, int)
    oracle = replace(runner.setup, device=simulated_gpu(tmp_path, "60MiB", expandable_segments=True))
    assert attempt(oracle, limit).attempt.fits
    assert not attempt(oracle, limit + 1).attempt.fits
    assert limit != autobatch.probe(workload, device="sim:rtx-4090", memory_budget="60MiB").micro_batch
    assert runner.confirm_fits(values) is None
    assert device.new_allocator().config.expandable_segments is False
    allocators.clear()
    assert runner.measure(values).micro_batch == micro_batches(4096, limit)[0]
    assert {one.config.expandable_segments for one in allocators} == {True}
