"""Limits that real batches survive, against training at them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from autobatch import DoesNotFitError, Plan, Probe
from autobatch.api.call import Call
from autobatch.api.pipeline import run as run_command
from autobatch.core.check_options import options_from
from autobatch.core.options import Options
from autobatch.planning import make_plan
from autobatch.rehearsal.process import Session, ThisProcess
from autobatch.rehearsal.setup import Setup
from autobatch.search import curve, real_batches
from autobatch.search.find_limit import find_limit
from autobatch.search.real_batches import plan_in_order, survive_real_batches
from autobatch.workload.order import GlobalBatchSampler
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
STEPS = 12


def limit_of(setup: Setup, target: int | None, home: Path) -> tuple[Probe, Listener]:
    """Find the limit of a batch."""
    listener = Listener()
    found = find_limit(ThisProcess(setup), Options(), share=target, home=home, progress=listener)
    return found.probe, listener


@pytest.fixture(name="short")
def short_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_batches, "REPLAYED", STEPS)


@pytest.mark.parametrize("is_traced", [True, pytest.param(False, marks=pytest.mark.program)])
@pytest.mark.usefixtures("short")
def test_the_answer_is_the_largest_that_trains_without_running_out(
    is_traced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_traced:
        monkeypatch.setattr(curve, "trace_setup", lambda *_: None)
    setup, target = simulated_setup(WORKLOAD, tmp_path, "40MiB"), 128
    before = fingerprint(setup.model)
    found, heard = limit_of(setup, target, tmp_path)
    assert fingerprint(setup.model) == before
    evidence = found.real_batches
    assert (evidence.by, evidence.batches) == (("replay", STEPS) if is_traced else ("run", real_batches.RUN))
    assert found.upper_bound_by == evidence.by
    assert heard.sizes == [evidence.micro_batch_alone, found.micro_batch]
    assert f"{evidence.micro_batch_alone} fits on the most expensive samples alone" in heard.notes[-1]
    larger = {math.ceil(target / count) for count in range(1, math.ceil(target / found.micro_batch))}
    larger = {size for size in larger if size <= evidence.micro_batch_alone}
    assert larger
    for size in (found.micro_batch, *larger):
        ran_out = count_ooms(WORKLOAD, setup, size, target=target, steps=STEPS)
        assert bool(ran_out) is (size in larger)


@pytest.mark.usefixtures("short")
def test_a_limit_that_real_batches_survive_stays(tmp_path: Path) -> None:
    found, heard = limit_of(simulated_setup(WORKLOAD, tmp_path, "40MiB"), None, tmp_path)
    assert heard.sizes == [found.micro_batch] == [found.real_batches.micro_batch_alone]
    assert found.real_batches.batches == STEPS


def test_equal_samples_and_allocators_without_a_cache_need_no_check(tmp_path: Path) -> None:
    equal = ragged_workload(train_data=tokens(), collate=None, size_of=None)
    for setup in (simulated_setup(equal, tmp_path, "40MiB"), make_setup(WORKLOAD)):
        process = ThisProcess(setup)
        assert survive_real_batches(process, probe_of(8), 24, 0, Listener()) == probe_of(8)


def test_an_interrupt_keeps_the_limit_of_the_most_expensive_samples(monkeypatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(real_batches, "find_survivor", interrupted)
    process, listener = ThisProcess(make_setup(ragged_workload())), Listener()
    stopped = probe_of(30, stopped_by="time limit")
    assert survive_real_batches(process, stopped, 256, 0, listener) == stopped
    probe = survive_real_batches(process, probe_of(30), 256, 0, listener)
    assert (probe.micro_batch, probe.stopped_by) == (30, "interrupt")
    assert "not checked" in listener.notes[0]


def test_a_sample_that_does_not_fit_alone_is_named_before_training() -> None:
    class WithOutlier(Sequences):
        def __getitem__(self, index: int):
            if index == 17:
                return torch.ones(40_000, dtype=torch.long), torch.ones(40_000, dtype=torch.long)
            return super().__getitem__(index)

    workload = ragged_workload(model=wide_model, train_data=WithOutlier(samples=64, longest=9))
    options = options_from(
        "plan", {"target_batch": 16, "device": "cpu", "memory_budget": "32MiB", "split": "count"}
    )
    call = Call(workload=workload, options=options)
    with pytest.raises(
        DoesNotFitError, match="sample 17 of the training data, the largest: its size is 40000"
    ) as caught:
        run_command(call)
    assert caught.value.exit_code == 3
    assert "cut shorter or left out" in str(caught.value)


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
        ({"sampler": torch.utils.data.SubsetRandomSampler(range(300))}, RUN_BATCHES),
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
