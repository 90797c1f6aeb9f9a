"""Limits that real batches survive, against training at them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from autobatch import DoesNotFitError, Plan
from autobatch.api.call import Call
from autobatch.api.pipeline import run as run_command
from autobatch.core.check_options import options_from
from autobatch.core.records import Attempt
from autobatch.planning import make_plan
from autobatch.search import curve, real_batches
from autobatch.search.real_batches import (
    Survivor,
    find_survivor,
    first_batches,
    plan_in_order,
    run_batches,
    survive_real_batches,
)
from autobatch.setup.attempt import Outcome
from autobatch.setup.session import Session, ThisProcess
from autobatch.workload.order import GlobalBatchSampler
from autobatch.workload.split import Split
from tests.support.probes import Listener, probe_of
from tests.support.ragged import (
    Sequences,
    count_ooms,
    joined_workload,
    ragged_workload,
    simulated_setup,
    wide_model,
)
from tests.support.training import fingerprint, make_setup, tokens

WORKLOAD = ragged_workload(model=wide_model, train_data=Sequences(samples=512, longest=59))
BUDGET = "40MiB"
STEPS = 12


def ooms(setup, micro_batch: int, target: int) -> int:
    return count_ooms(WORKLOAD, setup, micro_batch, target=target, steps=STEPS)


@pytest.fixture(name="short")
def short_replays(monkeypatch) -> None:
    monkeypatch.setattr(real_batches, "REPLAYED", STEPS)


@pytest.mark.parametrize("target", [200, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("short")
def test_the_answer_is_the_largest_that_trains_without_running_out(target: int, tmp_path: Path) -> None:
    setup = simulated_setup(WORKLOAD, tmp_path, BUDGET)
    found = find_survivor(Session(setup), target, target, 0)
    assert found is not None
    assert found.by == "replay"
    assert ooms(setup, found.micro_batch, target) == 0
    steps = math.ceil(target / found.micro_batch)
    larger = {math.ceil(target / count) for count in range(1, steps)} - {found.micro_batch}
    assert larger
    assert all(ooms(setup, micro_batch, target) for micro_batch in larger)


@pytest.mark.usefixtures("short")
def test_a_step_that_cannot_be_traced_runs_real_batches(tmp_path: Path, monkeypatch) -> None:
    setup = simulated_setup(WORKLOAD, tmp_path, BUDGET)
    monkeypatch.setattr(curve, "trace_setup", lambda *_: None)
    before = fingerprint(setup.model)
    found = find_survivor(Session(setup), 60, 96, 0)
    assert found is not None
    assert (found.by, found.batches) == ("run", real_batches.RUN)
    assert ooms(setup, found.micro_batch, 96) == 0
    assert fingerprint(setup.model) == before


def test_a_failed_run_says_why_and_leaves_the_model_alone(tmp_path: Path) -> None:
    setup = simulated_setup(WORKLOAD, tmp_path, "22MiB")
    before = fingerprint(setup.model)
    batches = run_batches(Session(setup), first_batches(setup, 512, 0))
    assert "out of memory" in batches.run_first(Split(), 512, count=1)
    assert batches.run_first(Split(), 4, count=1) is None
    assert fingerprint(setup.model) == before


def test_without_a_target_the_candidates_are_close_together(tmp_path: Path) -> None:
    setup = simulated_setup(WORKLOAD, tmp_path, BUDGET)
    session = Session(setup)
    found = find_survivor(session, 96, None, 0)
    assert found is not None
    for larger in range(found.micro_batch + 1, min(96, found.micro_batch + 4)):
        sampler = first_batches(session.setup, larger * real_batches.ASSUMED_STEPS, 0)
        assert run_batches(session, sampler).survived(Split(), larger) is None


def test_equal_samples_and_allocators_without_a_cache_need_no_check(tmp_path: Path) -> None:
    equal = ragged_workload(train_data=tokens(), collate=None, size_of=None)
    assert find_survivor(Session(simulated_setup(equal, tmp_path, BUDGET)), 8, 24, 0) is None
    assert find_survivor(Session(make_setup(WORKLOAD)), 8, 24, 0) is None


def test_a_sample_that_does_not_fit_alone_is_named_before_training(tmp_path: Path) -> None:
    class WithOutlier(Sequences):
        def __getitem__(self, index: int):
            if index == 17:
                return torch.ones(40_000, dtype=torch.long), torch.ones(40_000, dtype=torch.long)
            return super().__getitem__(index)

    workload = ragged_workload(model=wide_model, train_data=WithOutlier(samples=64, longest=9))
    options = options_from(
        "plan", {"target_batch": 16, "device": "cpu", "memory_budget": "32MiB", "split": "count"}
    )
    call = Call(workload=workload, options=options, environ={"AUTOBATCH_HOME": str(tmp_path)})
    with pytest.raises(
        DoesNotFitError, match="sample 17 of the training data, whose size of 40000"
    ) as caught:
        run_command(call)
    assert caught.value.exit_code == 3
    assert "cut shorter or left out" in str(caught.value)


# The stage that lowers a limit to one that real batches survive.


def outcome(process, micro_batch: int, *, fits: bool = True) -> Outcome:
    return Outcome(
        Attempt(
            micro_batch=micro_batch, fits=fits, peak_allocated_bytes=1, peak_reserved_bytes=1, seconds=0.0
        ),
        None,
    )


def survived(monkeypatch, found: Survivor | None, *, target: int | None = 256, fits: bool = True, **changes):
    monkeypatch.setattr(real_batches, "find_survivor", lambda *_: found)
    monkeypatch.setattr(real_batches, "run_attempt", lambda process, size: outcome(process, size, fits=fits))
    listener = Listener()
    process = ThisProcess(make_setup(ragged_workload()))
    return survive_real_batches(process, probe_of(30, **changes), target, 0, listener), listener


def test_a_lower_survivor_runs_once_and_becomes_the_answer(monkeypatch) -> None:
    probe, heard = survived(monkeypatch, Survivor(18, 300, "replay"))
    assert (probe.micro_batch, probe.upper_bound_by) == (18, "replay")
    assert [one.micro_batch for one in probe.attempts] == [18]
    assert (probe.real_batches.micro_batch_alone, probe.real_batches.batches) == (30, 300)
    assert heard.sizes == [18]
    assert "30 fits on the most expensive samples alone" in heard.notes[0]


def test_a_plan_of_as_many_steps_keeps_the_limit(monkeypatch) -> None:
    assert math.ceil(256 / 29) == math.ceil(256 / 30)
    probe, heard = survived(monkeypatch, Survivor(29, 300, "replay"))
    assert probe.micro_batch == 30
    assert probe.real_batches.batches == 300
    assert heard.sizes == heard.notes == []
    assert survived(monkeypatch, Survivor(29, 300, "replay"), target=None)[0].micro_batch == 29


@pytest.mark.parametrize("found", [None, Survivor(18, 300, "replay")])
def test_without_a_survivor_that_runs_the_limit_stays(monkeypatch, found) -> None:
    probe, _ = survived(monkeypatch, found, fits=False)
    assert probe.micro_batch == 30


def test_an_interrupted_probe_is_not_checked(monkeypatch) -> None:
    probe, _ = survived(monkeypatch, Survivor(18, 300, "replay"), stopped_by="time limit")
    assert (probe.micro_batch, probe.real_batches) == (30, None)


def test_an_interrupt_keeps_the_limit_of_the_most_expensive_samples(monkeypatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(real_batches, "find_survivor", interrupted)
    process, listener = ThisProcess(make_setup(ragged_workload())), Listener()
    probe = survive_real_batches(process, probe_of(30), 256, 0, listener)
    assert (probe.micro_batch, probe.stopped_by) == (30, "interrupt")
    assert "not checked" in listener.notes[0]


# Joined samples in the order of a run.

TARGET = 48
RUN_STEPS = 12
SAMPLES = len(joined_workload().train_data)  # type: ignore[arg-type]


def run_of(**length: int) -> GlobalBatchSampler:
    return GlobalBatchSampler(samples=SAMPLES, target_batch=TARGET, seed=0, **length)


RUN_BATCHES = run_of(steps=RUN_STEPS)


def plan_of(limit: int) -> Plan:
    return make_plan(target_batch=TARGET, micro_batch_limit=limit, learning_rate=0.01)


def ooms_of(workload, home: Path, micro_batch: int) -> int:
    setup = simulated_setup(workload, home, "6MiB")
    return count_ooms(workload, setup, micro_batch, target=TARGET, steps=RUN_STEPS)


@pytest.mark.parametrize("is_traced", [pytest.param(True, marks=pytest.mark.slow), False])
def test_the_answer_is_the_largest_that_survives_the_whole_run(
    is_traced: bool, tmp_path: Path, monkeypatch
) -> None:
    if not is_traced:
        monkeypatch.setattr(curve, "trace_setup", lambda *_: None)
    workload = joined_workload()
    setup = simulated_setup(workload, tmp_path, "6MiB")
    before = fingerprint(setup.model)
    found = plan_in_order(Session(setup), plan_of(4), RUN_BATCHES, TARGET)
    assert found is not None
    assert (found.run_order.batches, found.run_order.by) == (RUN_STEPS, "replay" if is_traced else "run")
    assert fingerprint(setup.model) == before
    assert ooms_of(workload, tmp_path, found.micro_batch) == 0
    steps = math.ceil(TARGET / found.micro_batch)
    assert steps > 1
    assert ooms_of(workload, tmp_path, math.ceil(TARGET / (steps - 1))) > 0


def test_no_larger_micro_batch_is_taken_above_the_cap(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(curve, "trace_setup", lambda *_: None)
    session = Session(simulated_setup(joined_workload(), tmp_path, "6MiB"))
    assert plan_in_order(session, plan_of(4), RUN_BATCHES, 4) is None
    assert plan_in_order(session, plan_of(4), RUN_BATCHES, 6).micro_batch == 6


@pytest.mark.parametrize(
    ("changes", "run"),
    [
        ({}, run_of()),
        ({}, run_of(epochs=10**9)),
        ({"sampler": torch.utils.data.RandomSampler(range(300))}, RUN_BATCHES),
    ],
)
def test_an_order_that_is_not_known_keeps_the_limit_of_the_largest_samples(
    changes, run: GlobalBatchSampler, tmp_path: Path
) -> None:
    session = Session(simulated_setup(joined_workload(**changes), tmp_path, "6MiB"))
    assert plan_in_order(session, plan_of(4), run, TARGET) is None


def test_padded_samples_and_sizes_that_do_not_decide_keep_the_limit(tmp_path: Path) -> None:
    padded = Session(simulated_setup(ragged_workload(), tmp_path, "6MiB"))
    assert plan_in_order(padded, plan_of(4), RUN_BATCHES, TARGET) is None
    rough = joined_workload(size_of=lambda sample: len(sample[0]) // 10)
    session = Session(simulated_setup(rough, tmp_path, "6MiB"))
    assert plan_in_order(session, plan_of(4), RUN_BATCHES, TARGET) is None
