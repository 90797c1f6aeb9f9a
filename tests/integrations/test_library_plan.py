"""Plans in equal micro-batches, for loops of other libraries."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from autobatch.core.errors import InputError
from autobatch.integrations.library_plan import (
    LibraryLoop,
    device_option,
    on_host,
    plan_for,
    precision_of,
    rebuilt,
    tell_plan,
)
from tests.support.training import make_workload, points

CPU = torch.device("cpu")


def a_loop(**changes: object) -> LibraryLoop:
    fields = {"name": "Loop", "world_size": 1, "device": CPU, "divides_by_plan": True}
    return LibraryLoop(**fields | changes)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOBATCH_HOME", str(tmp_path))


def test_the_plan_is_what_the_library_runs(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"target_batch": 20, "max_micro_batch": 7}
    plan = plan_for(make_workload(), a_loop(), loader=lambda size: f"of {size}", **options)  # type: ignore[arg-type]
    assert (plan.micro_batch, plan.accumulation_steps, plan.micro_batches) == (5, 4, [5] * 4)
    assert (plan.target_batch, plan.probe.micro_batch, plan.library, plan.loader) == (20, 7, "Loop", "of 5")
    assert [note for note in plan.notes if note.startswith("Loop: the last step of each epoch has 4 of 20")]
    with caplog.at_level(logging.INFO, logger="autobatch"):
        tell_plan(plan, is_first=True)
    assert capsys.readouterr().err == ""
    assert str(plan) == "\n".join(caplog.messages)
    assert caplog.messages[0].startswith("Loop: ")
    assert caplog.messages[-1].startswith("note: Loop: the last step of each epoch has 4 of 20 samples")
    with caplog.at_level(logging.WARNING, logger="autobatch"):
        tell_plan(plan, is_first=False)
        tell_plan(plan, is_first=True)
    assert capsys.readouterr().err == f"{plan}\n", "without a log the first process prints it"


def test_a_split_that_loses_half_the_size_names_better_targets() -> None:
    plan = plan_for(make_workload(), a_loop(), target_batch=23, max_micro_batch=8)
    assert plan.micro_batch == 1
    assert plan.notes[0] == (
        "Loop: a target batch of 23 splits into equal micro-batches of 1 in 23 accumulation steps at most, "
        "although 8 samples fit: a target batch of 21 or 24 needs fewer steps, and autobatch.batches splits "
        "any batch"
    )


def test_a_plan_for_other_ranks_is_refused() -> None:
    with pytest.raises(InputError, match="the plan is for 1 rank, and Loop runs in 2 processes"):
        plan_for(make_workload(), a_loop(world_size=2), target_batch=20, world_size=1)
    plan = plan_for(make_workload(), a_loop(world_size=2), target_batch=20, max_micro_batch=7)
    assert (plan.world_size, plan.micro_batch, plan.accumulation_steps) == (2, 5, 2)


def test_an_optimizer_is_rebuilt_over_a_copy_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    own = torch.optim.AdamW(
        [{"params": model[1].parameters(), "lr": 0.3}, {"params": model[0].parameters()}],
        lr=0.1,
        amsgrad=True,
    )
    copy = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    made = rebuilt(own, model, copy)
    assert type(made) is torch.optim.AdamW
    assert [group["lr"] for group in made.param_groups] == [0.3, 0.1]
    assert made.defaults["amsgrad"] is True
    assert made.param_groups[0]["params"] == [*copy[1].parameters()]
    with pytest.raises(InputError, match="AdamW trains parameters that are not the model's"):
        rebuilt(own, nn.Linear(1, 1), copy)


def test_devices_and_precisions_that_have_no_counterpart_are_refused() -> None:
    assert device_option(torch.device("cuda", 1)) == "cuda:1"
    assert device_option(torch.device("cpu", 0)) == "cpu", "a launcher numbers it"
    with pytest.raises(InputError, match="probes on cpu and cuda, and the library trains on mps"):
        device_option(torch.device("mps"))
    assert precision_of("no", {"no": "fp32"}, "it") == "fp32"
    with pytest.raises(InputError, match="plans for the precisions no of it, found fp8: choose one"):
        precision_of("fp8", {"no": "fp32"}, "it")


def test_a_model_on_the_host_stays_there() -> None:
    model = nn.Linear(1, 1)
    before = model.weight.data_ptr()
    with on_host(model):
        assert model.weight.data_ptr() == before


SHORT = (
    "the last step of each epoch has 16 of 24 samples in 2 of 3 micro-batches and is still divided by 3, so "
    "its gradient is 33% too small"
)
HEAVY = (
    "the last step of each epoch has 18 of 24 samples; the samples of its last micro-batch "
    "weigh 4 times as much"
)
TRAINER = {"divides_by_plan": False, "averages_means": False}


@pytest.mark.parametrize(
    ("samples", "changes", "words"),
    [
        (48, {}, None),
        (40, {}, SHORT),
        (42, {}, HEAVY),
        (42, TRAINER, "the last step of each epoch has 18 of 24 samples"),
        (42, {"drop_last": True}, SHORT),
        (30, {"drop_last": True}, None),
    ],
)
def test_the_last_step_of_an_epoch(samples: int, changes: dict[str, object], words: str | None) -> None:
    workload = make_workload(train_data=points(samples))
    plan = plan_for(workload, a_loop(**changes), target_batch=24, max_micro_batch=8)
    found = [note for note in plan.notes if "last step" in note]
    end = ": autobatch.batches carries them into the next epoch"
    assert found == ([] if words is None else [f"Loop: {words}{end}"])
