"""A trial: how large a micro-batch a configuration allows, whether it trains right, what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autobatch
from autobatch import api as rating
from autobatch import api as stages
from autobatch.core.knobs import Configuration
from autobatch.core.options import FitOptions, TuneOptions, options_from
from autobatch.device.cpu import CpuDevice
from autobatch.probing.attempt import TrainSetup, attempt
from autobatch.probing.setup import with_knobs
from autobatch.training import build as opening
from autobatch.tuning import trial as labs_module
from autobatch.tuning.configuration import LOSS, MEMORY, RUNS, Measurement
from autobatch.tuning.find_fastest import TuningResult
from autobatch.tuning.loss_check import LossCheck
from autobatch.tuning.timing import Timing, time_steps
from autobatch.tuning.trial import IsolatedTrials, TrialRunner, TrialSpec, micro_batch_of, open_trials
from autobatch.workload.contract import Workload
from autobatch.workload.data import WorstCaseSampler
from autobatch.workload.rng import capture_random_state
from tests.support.commandline import SMALL
from tests.support.training import Rows, make_workload, mean_loss

DEFAULTS: Configuration = {
    "micro_batch_shift": 0,
    "precision": "fp32",
    "checkpointing": "none",
    "channels_last": False,
    "optimizer": "default",
}


class Deep(nn.Module):
    """Blocks whose activations are most of the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(6)
        )
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def rows(samples: int = 64) -> Rows:
    generator = torch.Generator().manual_seed(0)
    return Rows(
        torch.randn(samples, 16, generator=generator), torch.randint(3, (samples,), generator=generator)
    )


def workload(**fields: Any) -> Workload:
    return make_workload(
        **{
            "model": Deep,
            "train_data": rows(),
            "optimizer": lambda params, lr: torch.optim.AdamW(params, lr=lr),
            "learning_rate": 1e-3,
            **fields,
        }
    )


def setup(
    budget: str | int = "1GiB", *, clock: Callable[[], float] | None = None, **fields: Any
) -> TrainSetup:
    mine = workload(**fields)
    torch.manual_seed(0)
    made = TrainSetup(
        workload=mine,
        model=mine.model(),
        device=CpuDevice(memory_budget=budget),
        worst_case=WorstCaseSampler(mine),
        precision="fp32",
    )
    return made if clock is None else replace(made, clock=clock)


def runner(made: TrainSetup, *, limit: int = 8, cap: int = 64, **more: Any) -> TrialRunner:
    task = TrialSpec(limit=limit, cap=cap, samples=64, planned_steps=100, seconds=0.0)
    opened = TrialRunner(made, options_from(TuneOptions, {"target_batch": 64}), task._replace(**more))
    opened.begin(DEFAULTS)
    return opened


def changed(**values: Any) -> Configuration:
    return {**DEFAULTS, **values}


class Time:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def timed_fields(time: Time, *, a_sample: float = 1.0, a_step: float = 5.0) -> dict[str, Any]:
    """A workload whose samples and optimizer steps take just so long."""

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            time.now += a_step

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        time.now += a_sample * len(batch[0])
        return mean_loss(model, batch)

    return {"loss": loss, "optimizer": lambda params, lr: Slow(params, lr=lr)}


def test_micro_batches_and_optimizer_steps_are_timed_apart() -> None:
    time = Time()
    made = setup(clock=time, **timed_fields(time))
    assert time_steps(made, [8] * 8, 0.0) == Timing(micro=8.0, step=5.0, setup=0.0)
    assert Timing(8.0, 5.0, 300.0).a_step(8, planned_steps=100) == 8 * 8 + 5 + 3
    found = runner(made).measure(DEFAULTS)
    assert found.samples_per_s == pytest.approx(64 / (8 * 8 + 5))
    assert (found.micro_batch, found.feasible) == (8, True)


def test_halving_the_micro_batch_runs_more_of_them() -> None:
    time = Time()
    found = runner(setup(clock=time, **timed_fields(time))).measure(changed(micro_batch_shift=2))
    assert found.micro_batch == 2
    assert found.samples_per_s == pytest.approx(64 / (64 + 5))
    assert [micro_batch_of(6, 64, {"micro_batch_shift": shift}) for shift in range(4)] == [6, 3, 1, 1]


def test_compiling_is_spread_over_the_planned_steps_and_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time()

    def compiled(forward: Any) -> Any:
        left = [200.0]

        def run(*args: Any) -> Any:
            # The first size that it meets, then the second.
            time.now += left.pop() if left else 0.0
            return forward(*args)

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    opened = runner(setup(clock=time, **timed_fields(time)))
    values = changed(compile="default")
    assert opened.measure(values).samples_per_s == pytest.approx(64 / (64 + 5 + 200 / 100), rel=0.1)
    first = opened._setups
    opened.measure(values)
    assert opened._setups == first


def test_a_trial_leaves_nothing_behind() -> None:
    made = setup()
    before = {name: (id(t), t.detach().clone()) for name, t in made.model.state_dict(keep_vars=True).items()}
    random_state = capture_random_state()
    opened = runner(made)
    for values in (DEFAULTS, changed(checkpointing="full", optimizer="fused", precision="bf16")):
        assert opened.measure(values).feasible
    after = made.model.state_dict(keep_vars=True)
    for name, (identity, tensor) in before.items():
        assert id(after[name]) == identity
        assert torch.equal(after[name], tensor)
        assert after[name].grad is None
    assert torch.equal(capture_random_state().torch, random_state.torch)


def test_what_takes_less_memory_gets_larger_micro_batches_that_fit() -> None:
    made = setup(budget=400_000, train_data=rows(512))
    limit = autobatch.probe(workload(train_data=rows(512)), device="cpu", memory_budget=400_000).micro_batch
    opened = runner(made, limit=limit, cap=512, samples=512)
    found = opened.measure(changed(checkpointing="full"))
    assert found.micro_batch > 1.5 * limit
    assert opened.confirm_fits(changed(checkpointing="full")) is None
    assert attempt(with_knobs(made, changed(checkpointing="full")), found.micro_batch).attempt.fits


def test_what_is_predicted_to_fit_with_room_or_not_at_all_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []
    monkeypatch.setattr(labs_module, "attempt", lambda *given: attempts.append(given) or attempt(*given))
    assert runner(setup()).measure(changed(optimizer="foreach")).feasible
    assert not attempts
    tight = setup(budget=60_000)
    refused = runner(tight, limit=1).measure(changed(optimizer="foreach"))
    assert (refused.failure or "").startswith("not even a micro-batch of 1 is predicted to fit in")
    assert refused.constraints[MEMORY] > 0
    assert not attempts


def test_without_a_prediction_it_is_run_and_a_smaller_size_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labs_module, "trace_footprint", lambda _: None)
    made = setup(budget=400_000, train_data=rows(512))
    found = runner(made, limit=8, cap=512, samples=512).measure(changed(optimizer="fused"))
    assert found.feasible
    assert attempt(made, found.micro_batch).attempt.fits


def test_losses_that_are_not_the_reference_s_are_refused() -> None:
    def spoiled(model: nn.Module, batch: Any) -> torch.Tensor:
        factor = 1.5 if torch.is_autocast_enabled("cpu") else 1.0
        return mean_loss(model, batch) * factor

    found = runner(setup(loss=spoiled)).measure(changed(precision="bf16"))
    assert (found.failure or "").startswith("its losses are not those of the reference")
    assert found.constraints[LOSS] == pytest.approx(0.48, abs=0.1)


def test_a_loss_that_is_not_finite_is_refused() -> None:
    def nan(model: nn.Module, batch: Any) -> torch.Tensor:
        return mean_loss(model, batch) * (float("nan") if torch.is_autocast_enabled("cpu") else 1.0)

    found = runner(setup(loss=nan)).measure(changed(precision="bf16"))
    assert found.constraints == {LOSS: 1.0}


def test_a_model_that_draws_at_random_is_given_its_noise() -> None:
    def noisy(model: nn.Module, batch: Any) -> torch.Tensor:
        return mean_loss(model, batch) * (1 + torch.rand(()))

    made = setup(loss=noisy)
    check = LossCheck(made, 8)
    assert check.over(with_knobs(made, changed(checkpointing="full"))) < 0
    assert check._noise > 0.02


def test_16_bits_train_as_32_do() -> None:
    assert runner(setup()).measure(changed(precision="bf16")).feasible


def test_an_error_is_the_workload_s_at_the_default_and_the_knob_s_elsewhere() -> None:
    def brittle(model: nn.Module, batch: Any) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            raise TypeError("no such kernel in 16 bits")
        return mean_loss(model, batch)

    found = runner(setup(loss=brittle)).measure(changed(precision="bf16"))
    assert found.failure == "TypeError: no such kernel in 16 bits"
    assert found.constraints == {RUNS: 1.0}

    def broken(model: nn.Module, batch: Any) -> torch.Tensor:
        raise TypeError("always")

    with pytest.raises(TypeError, match="always"):
        runner(setup(loss=broken)).measure(DEFAULTS)


def test_running_out_of_memory_while_it_is_timed_is_infeasible(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(labs_module, "time_steps", full)
    found = runner(setup()).measure(DEFAULTS)
    assert found.constraints == {MEMORY: 1.0}
    assert "Tried to allocate" in (found.failure or "")


def test_what_applies_is_read_off_the_workload() -> None:
    here = runner(setup()).context()
    assert (here.blocks, here.images, here.micro_batch) == (6, False, 8)
    assert (here.gains_from_compile, here.reads_pinned_memory) == (False, False)
    assert here.optimizers == ("default", "foreach", "fused")
    assert here.precisions[0] == "fp32"
    made = setup(
        model=lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)),
        train_data=Rows(torch.randn(8, 1, 4, 4), torch.randint(3, (8,))),
        optimizer=lambda params, lr: torch.optim.Adam(params, lr=lr, foreach=True),
    )
    there = runner(made).context()
    assert (there.images, there.blocks, there.optimizers) == (True, 0, ("default",))
    asked = TrialRunner(
        made, options_from(TuneOptions, {"target_batch": 8, "precision": "fp32"}), there_task()
    )
    assert asked.context().precisions == ("fp32",)


def there_task() -> TrialSpec:
    return TrialSpec(limit=4, cap=8, samples=8, planned_steps=1, seconds=0.0)


CRASHES = """
import ctypes
def crashing(model, batch):
    if torch.is_autocast_enabled("cpu"):
        ctypes.string_at(0)
    return loss(model, batch)
def workload():
    return small(loss=crashing)
"""


def test_a_trial_that_crashes_its_process_is_infeasible_and_the_next_one_runs(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"{SMALL}\n{CRASHES}\n")
    options = options_from(TuneOptions, {"target_batch": 32, "device": "cpu", "memory_budget": "64MiB"})
    task = TrialSpec(limit=8, cap=32, samples=32, planned_steps=10, seconds=0.0)
    with open_trials(f"{path}:workload", options, task, setup=setup, isolated=True) as trials:
        assert isinstance(trials, IsolatedTrials)
        assert trials.context().optimizers == ("default", "foreach", "fused")
        values = {"micro_batch_shift": 0, "precision": "fp32"}
        trials.begin(values)
        assert trials.measure(values).feasible
        refused = trials.measure({**values, "precision": "bf16"})
        assert refused.constraints == {RUNS: 1.0}
        assert "(SIGSEGV)" in (refused.failure or "")
        assert "\n" not in (refused.failure or "")
        assert trials.measure(values).feasible
        assert trials.confirm_fits(values) is None


def test_tuning_puts_the_choice_into_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is fastest here, the batch stays, and a second call has nothing left to try."""
    monkeypatch.setattr(stages, "TRIAL_SECONDS", 0.01)
    first = autobatch.tune(workload(), target_batch=48, memory_budget=400_000, device="cpu", trials=3, seed=1)
    assert first.tuning is not None
    assert first.plan is not None
    assert (sum(first.plan.micro_batches), first.plan.effective_batch) == (48, 48)
    assert first.tuning.trials == 3
    started: list[int] = []
    progress = stages.Progress()
    monkeypatch.setattr(progress, "measured", lambda *given: started.append(given[0]), raising=False)
    options = options_from(
        TuneOptions, {"target_batch": 48, "memory_budget": 400_000, "device": "cpu", "trials": 3, "seed": 1}
    )
    again = rating.run_tune_command(workload(), options, stages.RunContext(progress=progress))
    assert again.tuning is not None
    assert (again.tuning.study, again.tuning.history, started) == (
        first.tuning.study,
        first.tuning.history,
        [],
    )


def test_what_was_chosen_is_what_trains(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    best = {"micro_batch_shift": 1, "checkpointing": "full", "optimizer": "fused"}
    real = stages.find_fastest

    def chosen(*given: Any, **more: Any) -> TuningResult:
        found = real(*given, **more)
        import msgspec

        return TuningResult(msgspec.structs.replace(found.tuning, best=best), Measurement(100.0, 5))

    seen = []
    build_train_state = opening.build_train_state
    monkeypatch.setattr(stages, "find_fastest", chosen)
    monkeypatch.setattr(
        opening,
        "build_train_state",
        lambda *given, **more: seen.append(build_train_state(*given, **more)) or seen[-1],
    )
    result = autobatch.fit(
        workload(),
        target_batch=12,
        steps=2,
        trials=1,
        device="cpu",
        out=tmp_path / "run",
        knobs=",".join(best),
    )
    assert result.plan is not None
    assert result.plan.micro_batches == [4, 4, 4]
    assert result.plan.knobs == {"checkpointing": "full", "optimizer": "fused"}
    group = seen[0].optimizers[0].param_groups[0]
    assert (group["fused"], seen[0].loss.__module__) == (True, "autobatch.step.apply_knobs")
    assert result.training is not None
    assert result.training.optimizer_steps == 2


def test_a_run_is_tuned_for_its_own_length() -> None:
    def planned(**options: Any) -> int:
        facts = type("SetupInfo", (), {"samples": 100})
        kind = FitOptions if options else TuneOptions
        return stages._planned_steps(options_from(kind, {"target_batch": 30, **options}), facts)  # type: ignore[arg-type]

    assert (planned(), planned(steps=7), planned(epochs=2)) == (stages.PLANNED_STEPS, 7, 7)
