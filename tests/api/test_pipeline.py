"""The stages of each command: their order, their early errors and their interrupts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from autobatch.api.context import RunContext
from autobatch.api.pipeline import run as run_command
from autobatch.api.pipeline import run_estimate
from autobatch.core.check_options import options_from
from autobatch.core.errors import InputError
from autobatch.core.options import Options
from autobatch.core.records import Attempt
from autobatch.core.units import MiB
from autobatch.setup import child
from autobatch.tuning.tune_plan import PlanTuner
from tests.support.commandline import SMALL
from tests.support.probes import Listener, mlp, work
from tests.support.step_workloads import deep_transformer
from tests.support.training import make_workload


def context_in(home: Path, **fields: Any) -> RunContext:
    return RunContext(environ={"AUTOBATCH_HOME": str(home)}, **fields)


def plan_options(**values: Any) -> Options:
    return options_from("plan", {"target_batch": 64, "device": "cpu", "memory_budget": "2MiB", **values})


def test_a_plan_shows_where_the_memory_goes(tmp_path: Path) -> None:
    found = run_command(deep_transformer(), plan_options(), context_in(tmp_path))
    assert found.title == deep_transformer().name
    ran = {one.micro_batch: one.peak_allocated_bytes for one in found.probe.attempts if one.fits}
    predicted = {point.micro_batch: point.peak_reserved_bytes for point in found.predicted}
    answer = found.probe.micro_batch
    assert predicted[answer] == ran[answer]
    assert predicted[answer + 1] > 2 * MiB
    totals = [sum(sizes) for sizes in zip(*found.memory_curve.categories.values(), strict=True)]
    assert max(totals) == ran[answer]
    # A confirmed limit shows the same memory.
    again = run_command(deep_transformer(), plan_options(), context_in(tmp_path))
    assert again.probe.source != "search"
    assert again.memory_curve == found.memory_curve


def test_a_plan_whose_rule_lacks_a_base_batch_fails_before_the_probe(tmp_path: Path) -> None:
    listener = Listener()
    with pytest.raises(InputError, match="base_batch"):
        run_command(work(), plan_options(lr_rule="linear"), context_in(tmp_path, progress=listener))
    assert listener.sizes == []


def test_a_probe_limits_smaller_samples_too_but_not_if_one_size_is_checked(tmp_path: Path) -> None:
    probe = {"device": "cpu", "memory_budget": "2MiB"}
    found = run_command(work(), options_from("probe", probe), context_in(tmp_path, command="again"))
    assert found.probe.source == "search"
    assert found.profile is not None
    assert found.command == "again"
    options = options_from("probe", {**probe, "micro_batch": 3})
    checked = run_command(work(), options, context_in(tmp_path))
    assert (checked.probe.micro_batch, checked.probe.source, checked.profile) == (3, "asked", None)


class Interrupting(Listener):
    """Progress that interrupts the search after its second attempt."""

    def attempted(self, attempt: Attempt) -> None:
        super().attempted(attempt)
        if len(self.sizes) == 2:
            raise KeyboardInterrupt


def test_an_interrupted_probe_ends_a_plan_with_its_answer_and_a_tuning_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autobatch.setup.trace.trace_footprint", lambda *_, **__: None)
    found = run_command(work(), plan_options(), context_in(tmp_path, progress=Interrupting()))
    assert (found.probe.stopped_by, found.probe.micro_batch) == ("interrupt", 2)
    assert sum(found.plan.micro_batches) == 64
    options = options_from("tune", {"target_batch": 64, "device": "cpu", "memory_budget": "2MiB"})
    with pytest.raises(KeyboardInterrupt):
        run_command(work(), options, context_in(tmp_path, progress=Interrupting()))


@pytest.mark.parametrize(
    ("values", "stages"),
    [
        ({}, ["configurations"]),
        ({"trials": 0}, []),
        ({"tune_lr": True}, ["configurations", "learning rates"]),
        ({"trials": 0, "tune_lr": True}, ["learning rates"]),
    ],
)
def test_a_tuning_runs_the_stages_that_are_requested(
    values: dict[str, Any], stages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    real = {"tune": PlanTuner.tune, "tune_learning_rate": PlanTuner.tune_learning_rate}

    def noted(name: str, stage: str) -> Any:
        def run(tuner: PlanTuner, *given: Any) -> Any:
            if name == "tune_learning_rate" or tuner.trials:
                ran.append(stage)
            return real[name](tuner, *given)

        return run

    monkeypatch.setattr(PlanTuner, "tune", noted("tune", "configurations"))
    monkeypatch.setattr(PlanTuner, "tune_learning_rate", noted("tune_learning_rate", "learning rates"))
    monkeypatch.setattr("autobatch.tuning.tune_plan.TRIAL_SECONDS", 0.001)
    short = {"trials": 1, "knobs": "micro_batch_shift", "lr_trials": 1, "lr_steps": 4}
    options = {"target_batch": 64, "device": "cpu", "memory_budget": "2MiB", **short, **values}
    found = run_command(work(), options_from("tune", options), context_in(tmp_path))
    assert ran == stages
    assert found.tuning is not None
    assert found.tuning.trials == ("configurations" in stages)
    assert (found.tuning.learning_rate is not None) == ("learning rates" in stages)
    assert sum(found.plan.micro_batches) == 64


def test_a_storage_is_checked_before_the_model_is_built_if_it_is_used(tmp_path: Path) -> None:
    def model() -> nn.Module:
        raise AssertionError

    def tune(**values: Any) -> None:
        options = {"target_batch": 8, "device": "cpu", "storage": "nothing://there", **values}
        run_command(work(model), options_from("tune", options), context_in(tmp_path))

    for values in ({}, {"trials": 0, "tune_lr": True}):
        with pytest.raises(InputError, match="the storage nothing://there"):
            tune(**values)
    with pytest.raises(AssertionError):
        tune(trials=0)


def test_a_timer_starts_when_it_is_made_and_expires_after_its_seconds() -> None:
    now = [5.0]
    context = RunContext(clock=lambda: now[0])
    expired, never = context.expiry(3.0), context.expiry(None)
    now[0] = 8.0
    assert not expired()
    now[0] = 8.1
    assert expired()
    now[0] = 1e9
    assert not never()


@pytest.mark.usefixtures("warm_children")
def test_an_isolated_context_opens_a_reference_in_a_child_and_a_workload_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[object] = []
    real = child.open_setup
    monkeypatch.setattr(
        child, "open_setup", lambda given, *rest, **more: opened.append(given) or real(given, *rest, **more)
    )
    (tmp_path / "train.py").write_text(SMALL)
    options = options_from("probe", {"device": "cpu", "memory_budget": "2MiB", "micro_batch": 2})
    here = work()
    for workload in (here, f"{tmp_path / 'train.py'}:workload"):
        found = run_command(workload, options, context_in(tmp_path, isolated=True))
        assert found.probe.micro_batch == 2
    assert opened == [here]


def test_an_estimate_reads_the_data_directory_of_its_environment(tmp_path: Path) -> None:
    options = options_from("estimate", {"profile": ["t4"], "max_micro_batch": 2})
    found = run_estimate(work(lambda: mlp(8)), options, {"AUTOBATCH_HOME": str(tmp_path)})
    assert [one.micro_batch for one in found.estimates] == [2]


@pytest.mark.parametrize(
    ("options", "environ", "world", "share"),
    [
        ({}, {}, 1, 64),
        ({}, {"WORLD_SIZE": "4"}, 4, 16),
        ({"world_size": 3}, {"WORLD_SIZE": "4"}, 3, 22),
        ({"world_size": 1}, {"WORLD_SIZE": "4"}, 1, 64),
    ],
)
def test_a_plan_is_for_the_ranks_that_were_asked_for_or_launched(
    options: dict[str, Any], environ: dict[str, str], world: int, share: int, tmp_path: Path
) -> None:
    context = RunContext(environ=environ | {"AUTOBATCH_HOME": str(tmp_path)})
    result = run_command(make_workload(), plan_options(**options, max_micro_batch=5), context)
    assert result.plan is not None
    assert (result.plan.world_size, sum(result.plan.micro_batches)) == (world, share)
    assert result.plan.target_batch == 64


def test_a_rank_is_not_probed_beyond_its_share(tmp_path: Path) -> None:
    context = RunContext(environ={"AUTOBATCH_HOME": str(tmp_path)})
    result = run_command(make_workload(), plan_options(target_batch=8, world_size=4), context)
    assert result.probe is not None
    assert (result.probe.micro_batch, result.probe.limited_by) == (2, "target_batch")


def test_an_estimate_of_all_gpus_ignores_the_profiles(tmp_path: Path) -> None:
    options = options_from("estimate", {"profile": "t4", "all": True, "target_batch": 64})
    found = run_estimate(None, options, {"AUTOBATCH_HOME": str(tmp_path)})
    assert len(found.estimates) >= 15
    needs = [(one.plan.accumulation_steps, one.budget_bytes) for one in found.estimates if one.plan]
    assert needs == sorted(needs)


def test_a_batch_that_is_larger_than_the_data_is_noted(tmp_path: Path) -> None:
    workload = make_workload()
    samples, listener = len(workload.train_data), Listener()
    options = plan_options(target_batch=samples, max_micro_batch=4)
    run_command(workload, options, context_in(tmp_path, progress=listener))
    assert not any("larger than the data" in line for line in listener.notes)
    options = plan_options(target_batch=3 * samples, max_micro_batch=4)
    run_command(workload, options, context_in(tmp_path, progress=listener))
    [note] = [line for line in listener.notes if "larger than the data" in line]
    assert note.endswith(f"each step takes 3 epochs of {samples:,} samples")
