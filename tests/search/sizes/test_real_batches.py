"""Limits that real batches survive, against training at them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from autobatch.api.call import Call
from autobatch.api.pipeline import run as run_command
from autobatch.core.check_options import options_from
from autobatch.core.errors import DoesNotFitError
from autobatch.search.sizes import real_batches
from autobatch.search.sizes.real_batches import Order, RunBatches, find_survivor, program_of
from autobatch.setup.session import Session
from autobatch.workload.split import Split
from tests.support.ragged import Sequences, count_ooms, ragged_workload, simulated_setup, wide_model
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
    found = find_survivor(Session(setup), target, Order(target, 0))
    assert found is not None
    assert found.is_replayed
    assert ooms(setup, found.micro_batch, target) == 0
    steps = math.ceil(target / found.micro_batch)
    larger = {math.ceil(target / count) for count in range(1, steps)} - {found.micro_batch}
    assert larger
    assert all(ooms(setup, micro_batch, target) for micro_batch in larger)


@pytest.mark.usefixtures("short")
def test_a_step_that_cannot_be_traced_runs_real_batches(tmp_path: Path, monkeypatch) -> None:
    setup = simulated_setup(WORKLOAD, tmp_path, BUDGET)
    monkeypatch.setattr(real_batches, "trace_setup", lambda *_: None)
    before = fingerprint(setup.model)
    found = find_survivor(Session(setup), 60, Order(96, 0))
    assert found is not None
    assert (found.is_replayed, found.batches) == (False, real_batches.RUN)
    assert ooms(setup, found.micro_batch, 96) == 0
    assert fingerprint(setup.model) == before


def test_a_failed_run_says_why_and_leaves_the_model_alone(tmp_path: Path) -> None:
    setup = simulated_setup(WORKLOAD, tmp_path, "22MiB")
    before = fingerprint(setup.model)
    batches = RunBatches(setup=setup, sizes=setup.worst_case.sizes(), order=Order(512, 0))
    assert "out of memory" in batches.run_first(Split(), 512, count=1)
    assert batches.run_first(Split(), 4, count=1) is None
    assert fingerprint(setup.model) == before


def test_without_a_target_the_candidates_are_close_together(tmp_path: Path) -> None:
    setup = simulated_setup(WORKLOAD, tmp_path, BUDGET)
    session = Session(setup)
    found = find_survivor(session, 96, Order(None, 0))
    assert found is not None
    program = program_of(session, setup.worst_case.sizes())
    for larger in range(found.micro_batch + 1, min(96, found.micro_batch + 4)):
        order = Order(larger * real_batches.ASSUMED_STEPS, 0)
        batches = RunBatches(setup=setup, sizes=setup.worst_case.sizes(), order=order)
        assert not batches.replay(program, Split(), larger).fits


def test_equal_samples_and_allocators_without_a_cache_need_no_check(tmp_path: Path) -> None:
    equal = ragged_workload(train_data=tokens(), collate=None, size_of=None)
    assert find_survivor(Session(simulated_setup(equal, tmp_path, BUDGET)), 8, Order(24, 0)) is None
    assert find_survivor(Session(make_setup(WORKLOAD)), 8, Order(24, 0)) is None


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
