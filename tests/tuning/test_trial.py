"""Trials: the knobs that apply, the limit of a configuration, its losses and its speed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autobatch
from autobatch.core.knobs import TuningContext, applicable
from autobatch.core.options import Options
from autobatch.device.host import usable_cores
from autobatch.device.profiles import load_profile
from autobatch.device.simulated import SimulatedDevice
from autobatch.planning import make_plan, micro_batches
from autobatch.rehearsal.attempt import attempt
from autobatch.rehearsal.process import Session, ThisProcess, open_process
from autobatch.rehearsal.setup import Role, Setup, with_knobs
from autobatch.tuning.learning_rate import LrTrialSpec, ShortRuns
from autobatch.tuning.trial import TrialResults, Trials, look_at_workload
from autobatch.workload.rng import capture_random_state
from tests.support.commandline import SMALL
from tests.support.feeds import loader_workers
from tests.support.kinds import Augmented
from tests.support.training import Rows, make_setup, mean_loss, points
from tests.support.trials import (
    DEFAULTS,
    LOADING,
    Signed,
    Time,
    make_trials,
    signed,
    task_with,
    trial_setup,
)
from tests.support.untouched import fingerprint, with_gradients


def changed(**values: Any) -> Any:
    return {**DEFAULTS, **values}


def context_of(made: Setup, **fields: Any) -> TuningContext:
    return look_at_workload(Session(made), task_with(**fields))


def simulated_gpu(folder: Path, budget: str, **more: Any) -> SimulatedDevice:
    return SimulatedDevice(load_profile("rtx-4090", user_dir=folder), memory_budget=budget, **more)


def test_the_context_describes_the_workload_and_the_device(tmp_path: Path) -> None:
    here = context_of(trial_setup())
    assert (here.blocks, here.images, here.micro_batch) == (6, False, 8)
    assert (here.gains_from_compile, here.reads_pinned_memory) == (False, False)
    assert here.optimizers == ("default", "foreach", "fused")
    assert (here.precisions[0], here.loader) == ("fp32", None)
    assert here.segments == "only the allocator of a GPU keeps segments"
    made = trial_setup(
        model=lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)),
        train_data=Rows(torch.randn(8, 1, 4, 4), torch.randint(3, (8,))),
        optimizer=lambda params, lr: torch.optim.Adam(params, lr=lr, foreach=True),
    )
    there = context_of(made, is_precision_open=False)
    assert (there.images, there.blocks) == (True, 0)
    assert (there.optimizers, there.precisions) == (("default",), ("fp32",))
    gpu = context_of(make_setup(signed(set()), device=simulated_gpu(tmp_path, "1GiB")))
    assert [axis.name for axis in applicable(gpu, ["expandable_segments"])[0]] == ["expandable_segments"]
    expandable = simulated_gpu(tmp_path, "1GiB").expandable()
    assert (
        context_of(make_setup(signed(set()), device=expandable)).segments == "segments are expandable already"
    )


# Time.


def timed_fields(time: Time, *, a_sample: float = 1.0, a_step: float = 5.0) -> dict[str, Any]:
    """Return a loss and an optimizer that take a fixed time per sample and per step."""

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            time.now += a_step

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        time.now += a_sample * len(batch[0])
        return mean_loss(model, batch)

    return {"loss": loss, "optimizer": lambda params, lr: Slow(params, lr=lr)}


def test_micro_batches_and_optimizer_steps_are_timed_apart() -> None:
    time = Time()
    made = trial_setup(clock=time, **timed_fields(time))
    found = make_trials(made).measure(DEFAULTS)
    assert found.samples_per_s == pytest.approx(64 / (8 * 8 + 5))
    assert (found.micro_batch, found.feasible) == (8, True)
    halved = make_trials(made).measure(changed(micro_batch_shift=2))
    assert (halved.micro_batch, halved.samples_per_s) == (2, pytest.approx(64 / (64 + 5)))


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
    trials = make_trials(trial_setup(clock=time, **timed_fields(time)))
    for _ in range(2):  # measured again, it compiles no more, and counts as before
        found = trials.measure(changed(compile="default"))
        assert found.samples_per_s == pytest.approx(64 / (64 + 5 + 200 / 100), rel=0.1)


@pytest.mark.parametrize(("a_fetch", "share"), [(1.0, 0.25), (0.0001, 0.0)])
def test_the_share_of_fetching_is_measured(a_fetch: float, share: float) -> None:
    time = Time()

    class Timed(Augmented):
        def __getitem__(self, index: int):
            time.now += a_fetch
            return super().__getitem__(index)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        time.now += 3.0 * len(batch[0])
        return mean_loss(model, batch)

    workload = signed(set(), loss=loss, train_data=Timed(*points(64, dtype=torch.float32).columns))
    clocked = replace(make_setup(workload), clock=time)
    assert context_of(clocked).fetch_share == pytest.approx(share if usable_cores() > 1 else 0.0)


def full(*_: Any) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def test_memory_that_runs_out_while_timing_makes_a_trial_infeasible_and_the_share_unknown() -> None:
    assert "Tried to allocate" in (make_trials(trial_setup(loss=full)).measure(DEFAULTS).failure or "")
    ticks = iter(range(10**6))
    clocked = replace(make_setup(signed(set(), loss=full)), clock=lambda: float(next(ticks)))
    assert context_of(clocked).fetch_share == 0.0


def test_a_trial_leaves_nothing_behind() -> None:
    made = trial_setup()
    with_gradients(made.model)
    before = fingerprint(made.model)
    trials = make_trials(made)
    for values in (DEFAULTS, changed(checkpointing="full", optimizer="fused", precision="bf16")):
        assert trials.measure(values).feasible
    assert fingerprint(made.model) == before


def test_an_error_is_raised_at_the_default_and_makes_other_configurations_infeasible() -> None:
    def brittle(model: nn.Module, batch: Any) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            raise TypeError("no such kernel in 16 bits")
        return mean_loss(model, batch)

    found = make_trials(trial_setup(loss=brittle)).measure(changed(precision="bf16"))
    assert found.failure == "TypeError: no such kernel in 16 bits"

    def broken(model: nn.Module, batch: Any) -> torch.Tensor:
        raise TypeError("always")

    with pytest.raises(TypeError, match="always"):
        make_trials(trial_setup(loss=broken)).measure(DEFAULTS)


# Loader workers.


def test_workers_that_are_tuned_or_asked_for_feed_a_trial() -> None:
    seen: set[int] = set()
    trials = make_trials(make_setup(signed(seen)), defaults=LOADING)
    assert trials.measure(LOADING).feasible
    assert seen == {os.getpid()}
    seen.clear()
    before = capture_random_state()
    assert trials.measure({**LOADING, "loader_workers": 2, "prefetch": 4}).feasible
    assert len(seen - {os.getpid()}) == 2
    assert not loader_workers()
    assert torch.equal(capture_random_state().torch, before.torch)
    seen.clear()
    trials = make_trials(make_setup(signed(seen)), defaults=LOADING, workers=1)
    assert trials.measure({"micro_batch_shift": 1}).feasible
    assert len(seen - {os.getpid()}) == 1
    _, notes = applicable(context_of(trials.process.setup, workers=1), ["loader_workers"])
    assert notes == ["loader_workers is not tuned: the number of workers is given"]


def test_a_trial_whose_workers_raise_is_infeasible_and_the_next_one_runs() -> None:
    home = os.getpid()

    class Shy(Signed):
        def __getitem__(self, index: int):
            if os.getpid() != home:
                raise ValueError("not here")
            return super().__getitem__(index)

    workload = signed(set(), train_data=Shy(*points(64, dtype=torch.float32).columns))
    trials = make_trials(make_setup(workload), defaults=LOADING)
    refused = trials.measure({**LOADING, "loader_workers": 2})
    assert "] raised ValueError: not here" in (refused.failure or "")
    assert not loader_workers()
    assert trials.measure(LOADING).feasible


CRASHES = """
import ctypes
class Random(torch.utils.data.Dataset):
    def __len__(self): return 32
    def __getitem__(self, index): return torch.randn(4), torch.randn(1)
def crashing(model, batch):
    if torch.is_autocast_enabled("cpu"):
        ctypes.string_at(0)
    return loss(model, batch)
def crashing_too(params, learning_rate):
    if learning_rate == 1e6:
        ctypes.string_at(0)
    return torch.optim.SGD(params, lr=learning_rate)
def workload():
    return small(train_data=Random(), loss=crashing, optimizer=crashing_too)
"""


@pytest.mark.usefixtures("warm_children")
def test_a_child_runs_trials_and_short_runs_and_one_that_crashes_it_is_infeasible(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"{SMALL}\n{CRASHES}\n")
    defaults = {**LOADING, "precision": "fp32"}
    task = task_with(limit=8, cap=32, samples=32, defaults=defaults)
    settings = Options().with_values(device="cpu", memory_budget="64MiB")
    with open_process(f"{path}:workload", settings, Role(), isolated=True) as child:
        crashed = Trials(child, task).measure({**defaults, "precision": "bf16"})
        found = Trials(child, task).measure({**defaults, "loader_workers": 2})
        plan = make_plan(target_batch=32, micro_batch_limit=8, learning_rate=0.01)
        runs = ShortRuns(child, LrTrialSpec(plan, steps=4))
        rates = [runs(rate, 0).failure or "" for rate in (0.01, 1e6, 0.01)]
    assert "(SIGSEGV)" in (crashed.failure or "")
    assert found.failure is None
    assert ["(SIGSEGV)" in one for one in rates] == [False, True, False]


# Limits.


def test_the_trials_of_another_study_have_their_own_limit() -> None:
    process = ThisProcess(trial_setup())
    assert Trials(process, task_with()).measure(DEFAULTS).micro_batch == 8
    assert Trials(process, task_with(limit=4)).measure(DEFAULTS).micro_batch == 4
    halves = [changed(micro_batch_shift=shift) for shift in range(4)]
    trials = Trials(process, task_with(limit=6))
    assert [trials.confirm(values).micro_batch for values in halves] == [6, 3, 1, 1]


def test_a_configuration_that_needs_less_memory_gets_a_larger_micro_batch_that_fits() -> None:
    made = trial_setup(budget=400_000, samples=512)
    trials, values = make_trials(made, cap=512, samples=512), changed(checkpointing="full")
    found = trials.measure(values)
    assert trials.confirm(values).feasible
    assert attempt(with_knobs(made, values), found.micro_batch).attempt.fits
    assert not attempt(made, found.micro_batch).attempt.fits


def test_a_configuration_that_never_fits_is_infeasible() -> None:
    found = make_trials(trial_setup(budget=60_000), limit=1).measure(changed(optimizer="foreach"))
    assert found.failure == "not even a micro-batch of 1 fits"


@pytest.mark.program
def test_expandable_segments_have_their_own_limit(tmp_path: Path) -> None:
    """The oracle is attempts on a GPU whose segments are expandable from the start."""
    layers = [nn.Linear(640, 640) for _ in range(6)]
    workload = signed(set(), model=lambda: nn.Sequential(nn.Linear(5, 640), *layers, nn.Linear(640, 3)))
    device = simulated_gpu(tmp_path, "60MiB")
    made = make_setup(workload, device=device)
    trials = make_trials(made, cap=4096, samples=4096, limit=16, defaults=LOADING)
    values = {**LOADING, "expandable_segments": True}
    limit = TrialResults(trials.process.setup, trials.task).limit(values)
    oracle = replace(trials.process.setup, device=simulated_gpu(tmp_path, "60MiB", expandable_segments=True))
    assert attempt(oracle, limit).attempt.fits
    assert not attempt(oracle, limit + 1).attempt.fits
    assert limit != autobatch.probe(workload, device="sim:rtx-4090", memory_budget="60MiB").micro_batch
    assert trials.confirm(values).feasible
    assert device.new_allocator().config.expandable_segments is False
    assert trials.measure(values).micro_batch == micro_batches(4096, limit)[0]


# Losses.


@pytest.mark.parametrize(
    ("factor", "reason"),
    [
        (1.5, "its losses differ from the reference"),
        (float("nan"), "the workload's loss is nan on its first micro-batch"),
    ],
)
def test_losses_in_bf16_that_are_far_from_those_in_fp32_are_infeasible(factor: float, reason: str) -> None:
    def spoiled(model: nn.Module, batch: Any) -> torch.Tensor:
        return mean_loss(model, batch) * (factor if torch.is_autocast_enabled("cpu") else 1.0)

    failure = make_trials(trial_setup(loss=spoiled)).measure(changed(precision="bf16")).failure
    assert (failure or "").startswith(reason)


def test_the_noise_of_a_random_model_is_tolerated() -> None:
    def noisy(model: nn.Module, batch: Any) -> torch.Tensor:
        return mean_loss(model, batch) * (1 + torch.rand(()))

    assert make_trials(trial_setup(loss=noisy)).measure(changed(checkpointing="full")).feasible
