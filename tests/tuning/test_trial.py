"""Trials: the limit of a configuration, its losses and its speed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autobatch
from autobatch.core.knobs import LOADER_WORKERS, applicable
from autobatch.core.options import Options
from autobatch.device.allocator.caching import CachingAllocator
from autobatch.planning import micro_batches
from autobatch.setup.attempt import attempt
from autobatch.setup.session import ThisProcess, open_process
from autobatch.setup.setup import with_knobs
from autobatch.tuning import trial as trial_module
from autobatch.tuning.measure import Timing
from autobatch.tuning.trial import LossCheck, TrialRunner, Trials
from autobatch.workload.rng import capture_random_state
from tests.support.commandline import SMALL
from tests.support.processes import loader_workers
from tests.support.training import mean_loss, points
from tests.support.trials import (
    DEFAULTS,
    LOADING,
    Signed,
    Time,
    changed,
    context_of,
    deep_layers,
    deep_rows,
    loading_runner,
    make_runner,
    signed,
    simulated_gpu,
    task_with,
    timed_fields,
    trial_setup,
    trial_workload,
)


def test_halving_the_micro_batch_runs_more_of_them() -> None:
    time = Time()
    found = make_runner(trial_setup(clock=time, **timed_fields(time))).measure(changed(micro_batch_shift=2))
    assert found.micro_batch == 2
    assert found.samples_per_s == pytest.approx(64 / (64 + 5))


def test_compiling_is_spread_over_the_planned_steps_and_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time()

    def compiled(forward: Any, mode: str) -> Any:
        left = [200.0]

        def run(*args: Any) -> Any:
            # Compiling takes time for the first size and for the second.
            time.now += left.pop() if left else 0.0
            return forward(*args)

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    opened = make_runner(trial_setup(clock=time, **timed_fields(time)))
    values = changed(compile="default")
    assert opened.measure(values).samples_per_s == pytest.approx(64 / (64 + 5 + 200 / 100), rel=0.1)
    # Measured again, it compiles no more, and counts as before.
    assert opened.measure(values).samples_per_s == pytest.approx(64 / (64 + 5 + 200 / 100), rel=0.1)


def test_a_trial_leaves_nothing_behind() -> None:
    made = trial_setup()
    before = {name: (id(t), t.detach().clone()) for name, t in made.model.state_dict(keep_vars=True).items()}
    random_state = capture_random_state()
    opened = make_runner(made)
    for values in (DEFAULTS, changed(checkpointing="full", optimizer="fused", precision="bf16")):
        assert opened.measure(values).feasible
    after = made.model.state_dict(keep_vars=True)
    for name, (identity, tensor) in before.items():
        assert id(after[name]) == identity
        assert torch.equal(after[name], tensor)
        assert after[name].grad is None
    assert torch.equal(capture_random_state().torch, random_state.torch)


def test_an_error_is_raised_at_the_default_and_makes_other_configurations_infeasible() -> None:
    def brittle(model: nn.Module, batch: Any) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            raise TypeError("no such kernel in 16 bits")
        return mean_loss(model, batch)

    found = make_runner(trial_setup(loss=brittle)).measure(changed(precision="bf16"))
    assert found.failure == "TypeError: no such kernel in 16 bits"

    def broken(model: nn.Module, batch: Any) -> torch.Tensor:
        raise TypeError("always")

    with pytest.raises(TypeError, match="always"):
        make_runner(trial_setup(loss=broken)).measure(DEFAULTS)


def test_running_out_of_memory_during_timing_is_infeasible() -> None:
    def full(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    found = make_runner(trial_setup(loss=full)).measure(DEFAULTS)
    assert "Tried to allocate" in (found.failure or "")


def test_a_trial_with_workers_times_steps_that_workers_feed() -> None:
    seen: set[int] = set()
    runner = loading_runner(signed(seen))
    assert runner.measure(LOADING).feasible
    assert seen == {os.getpid()}
    seen.clear()
    before = capture_random_state()
    assert runner.measure({**LOADING, "loader_workers": 2}).feasible
    assert len(seen - {os.getpid()}) == 2
    assert not loader_workers()
    assert torch.equal(capture_random_state().torch, before.torch)


def test_a_requested_number_of_workers_feeds_every_trial_and_is_not_tuned() -> None:
    seen: set[int] = set()
    runner = loading_runner(signed(seen), workers=1)
    assert runner.measure({"micro_batch_shift": 1}).feasible
    assert len(seen - {os.getpid()}) == 1
    context = context_of(runner.setup, workers=1)
    assert context.loader == "the number of workers is given"
    _, notes = applicable(context, [LOADER_WORKERS])
    assert notes == ["loader_workers is not tuned: the number of workers is given"]


@pytest.mark.parametrize(
    ("fields", "values", "ahead"),
    [({}, {}, 2), ({}, {"prefetch": 8}, 8), ({"prefetch": 3}, {"prefetch": 8}, 3)],
)
def test_a_trial_prefetches_as_the_option_or_else_the_knob_says(fields, values, ahead, monkeypatch) -> None:
    seen: list[int] = []

    def noted(*_: object, prefetch: int, **more: object) -> Timing:
        seen.append(prefetch)
        return Timing(1.0, 1.0, 0.0)

    monkeypatch.setattr(trial_module, "time_steps", noted)
    loading_runner(signed(set()), **fields).measure({**LOADING, "loader_workers": 2, **values})
    assert seen == [ahead]


def test_a_trial_whose_workers_raise_is_infeasible_and_the_next_one_runs() -> None:
    home = os.getpid()

    class Shy(Signed):
        def __getitem__(self, index: int):
            if os.getpid() != home:
                raise ValueError("not here")
            return super().__getitem__(index)

    runner = loading_runner(signed(set(), train_data=Shy(*points(64, dtype=torch.float32).columns)))
    refused = runner.measure({**LOADING, "loader_workers": 2})
    assert "] raised ValueError: not here" in (refused.failure or "")
    assert not loader_workers()
    assert runner.measure(LOADING).feasible


def test_the_trials_of_one_study_share_their_checks_and_those_of_another_do_not() -> None:
    process = ThisProcess(trial_setup())
    trials = Trials(process, task_with())
    assert trials.measure(DEFAULTS).feasible
    first = process._session.find(TrialRunner)
    assert trials.confirm(DEFAULTS).feasible
    assert process._session.find(TrialRunner) is first
    assert Trials(process, task_with(limit=4)).measure(DEFAULTS).micro_batch == 4
    assert process._session.find(TrialRunner) is not first


RANDOM = """
class Random(torch.utils.data.Dataset):
    def __len__(self): return 32
    def __getitem__(self, index): return torch.randn(4), torch.randn(1)
def workload():
    return small(train_data=Random())
"""


@pytest.mark.usefixtures("warm_children")
def test_a_child_process_that_runs_trials_may_have_workers(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"{SMALL}\n{RANDOM}\n")
    task = task_with(limit=8, cap=32, samples=32, defaults=LOADING)
    settings = Options().with_values(device="cpu", memory_budget="64MiB")
    with open_process(f"{path}:workload", settings, isolated=True) as child:
        found = Trials(child, task).measure({**LOADING, "loader_workers": 2})
    assert found.failure is None


def test_a_micro_batch_is_halved_as_often_as_asked() -> None:
    runner = make_runner(trial_setup(), limit=6)
    found = [runner.confirm(changed(micro_batch_shift=shift)).micro_batch for shift in range(4)]
    assert found == [6, 3, 1, 1]


def test_a_configuration_that_needs_less_memory_gets_a_larger_micro_batch_that_fits() -> None:
    made = trial_setup(budget=400_000, train_data=deep_rows(512))
    limit = autobatch.probe(
        trial_workload(train_data=deep_rows(512)), device="cpu", memory_budget=400_000
    ).micro_batch
    opened = make_runner(made, limit=limit, cap=512, samples=512)
    found = opened.measure(changed(checkpointing="full"))
    assert found.micro_batch > 1.5 * limit
    assert opened.confirm(changed(checkpointing="full")).feasible
    assert attempt(with_knobs(made, changed(checkpointing="full")), found.micro_batch).attempt.fits


def test_a_configuration_that_never_fits_is_infeasible() -> None:
    found = make_runner(trial_setup(budget=60_000), limit=1).measure(changed(optimizer="foreach"))
    assert found.failure == "not even a micro-batch of 1 fits"


def test_without_a_prediction_runs_find_a_size_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_module, "trace_footprint", lambda _: None)
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
    limit = runner.limit(values)
    oracle = replace(runner.setup, device=simulated_gpu(tmp_path, "60MiB", expandable_segments=True))
    assert attempt(oracle, limit).attempt.fits
    assert not attempt(oracle, limit + 1).attempt.fits
    assert limit != autobatch.probe(workload, device="sim:rtx-4090", memory_budget="60MiB").micro_batch
    assert runner.confirm(values).feasible
    assert device.new_allocator().config.expandable_segments is False
    allocators.clear()
    assert runner.measure(values).micro_batch == micro_batches(4096, limit)[0]
    assert {one.config.expandable_segments for one in allocators} == {True}


def test_losses_far_from_the_reference_are_infeasible() -> None:
    def spoiled(model: nn.Module, batch: Any) -> torch.Tensor:
        factor = 1.5 if torch.is_autocast_enabled("cpu") else 1.0
        return mean_loss(model, batch) * factor

    found = make_runner(trial_setup(loss=spoiled)).measure(changed(precision="bf16"))
    assert (found.failure or "").startswith("its losses differ from the reference")


def test_a_non_finite_loss_is_infeasible() -> None:
    def nan(model: nn.Module, batch: Any) -> torch.Tensor:
        return mean_loss(model, batch) * (float("nan") if torch.is_autocast_enabled("cpu") else 1.0)

    found = make_runner(trial_setup(loss=nan)).measure(changed(precision="bf16"))
    assert (found.failure or "").startswith("the workload's loss is nan on its first micro-batch")


def test_the_noise_of_a_random_model_is_tolerated() -> None:
    def noisy(model: nn.Module, batch: Any) -> torch.Tensor:
        return mean_loss(model, batch) * (1 + torch.rand(()))

    made = trial_setup(loss=noisy)
    check = LossCheck(made, 8)
    assert check.over(with_knobs(made, changed(checkpointing="full"))) < 0


def test_bf16_trains_as_fp32_does() -> None:
    assert make_runner(trial_setup()).measure(changed(precision="bf16")).feasible
