"""The largest micro-batch of joined samples in the order of a run, against training at it and above it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from autobatch.core.records import Plan
from autobatch.planning import make_plan
from autobatch.search.sizes import real_batches
from autobatch.search.sizes.real_batches import Order
from autobatch.search.sizes.run_order import find_in_order
from autobatch.setup.session import Session
from tests.support.ragged import count_ooms, joined_workload, ragged_workload, simulated_setup
from tests.support.training import fingerprint

TARGET = 48
STEPS = 12
ORDER = Order(TARGET, 0, steps=STEPS)


def plan_of(limit: int) -> Plan:
    return make_plan(target_batch=TARGET, micro_batch_limit=limit, learning_rate=0.01)


def ooms(workload, home: Path, micro_batch: int) -> int:
    setup = simulated_setup(workload, home, "6MiB")
    return count_ooms(workload, setup, micro_batch, target=TARGET, steps=STEPS)


@pytest.mark.parametrize("is_traced", [pytest.param(True, marks=pytest.mark.slow), False])
def test_the_answer_is_the_largest_that_survives_the_whole_run(
    is_traced: bool, tmp_path: Path, monkeypatch
) -> None:
    if not is_traced:
        monkeypatch.setattr(real_batches, "trace_setup", lambda *_: None)
    workload = joined_workload()
    setup = simulated_setup(workload, tmp_path, "6MiB")
    before = fingerprint(setup.model)
    found = find_in_order(Session(setup), plan_of(4), ORDER, TARGET)
    assert found is not None
    assert (found.batches, found.by) == (STEPS, "replay" if is_traced else "run")
    assert fingerprint(setup.model) == before
    assert ooms(workload, tmp_path, found.micro_batch) == 0
    steps = math.ceil(TARGET / found.micro_batch)
    assert steps > 1
    assert ooms(workload, tmp_path, math.ceil(TARGET / (steps - 1))) > 0


def test_no_larger_micro_batch_is_taken_above_the_cap(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(real_batches, "trace_setup", lambda *_: None)
    session = Session(simulated_setup(joined_workload(), tmp_path, "6MiB"))
    assert find_in_order(session, plan_of(4), ORDER, 4) is None
    assert find_in_order(session, plan_of(4), ORDER, 6).micro_batch == 6


@pytest.mark.parametrize(
    ("changes", "order"),
    [
        ({}, Order(TARGET, 0)),
        ({}, Order(TARGET, 0, epochs=10**9)),
        ({"sampler": torch.utils.data.RandomSampler(range(300))}, ORDER),
    ],
)
def test_an_order_that_is_not_known_keeps_the_limit_of_the_largest_samples(
    changes, order: Order, tmp_path: Path
) -> None:
    session = Session(simulated_setup(joined_workload(**changes), tmp_path, "6MiB"))
    assert find_in_order(session, plan_of(4), order, TARGET) is None


def test_padded_samples_and_sizes_that_do_not_decide_keep_the_limit(tmp_path: Path) -> None:
    padded = Session(simulated_setup(ragged_workload(), tmp_path, "6MiB"))
    assert find_in_order(padded, plan_of(4), ORDER, TARGET) is None
    rough = joined_workload(size_of=lambda sample: len(sample[0]) // 10)
    assert find_in_order(Session(simulated_setup(rough, tmp_path, "6MiB")), plan_of(4), ORDER, TARGET) is None
