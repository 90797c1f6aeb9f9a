"""Micro-batches of a plan that do not fit although a larger one does."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from autobatch.core.options import Options
from autobatch.core.records import RealBatches
from autobatch.search.one_probe import Limit
from autobatch.search.planned_sizes import limit_of_plan
from autobatch.setup.attempt import attempt
from autobatch.setup.session import ThisProcess
from autobatch.setup.setup import Setup, open_setup
from benchmarks.workloads import WORKLOADS
from tests.support.probes import Listener, limit_of

BATCH = 2048


@pytest.fixture(scope="module", name="setup")
def opened() -> Setup:
    return open_setup(WORKLOADS["mlp-heavy"](), Options().with_values(device="sim:t4", memory_budget="6MiB"))


@pytest.fixture(scope="module", name="limit")
def probed(setup: Setup, tmp_path_factory: pytest.TempPathFactory) -> Limit:
    return limit_of(setup, tmp_path_factory.mktemp("home"), target_batch=BATCH)


def test_a_batch_is_split_into_more_if_its_parts_do_not_fit(setup: Setup, limit: Limit) -> None:
    assert limit.probe.micro_batch == 697
    fits = {size: attempt(setup, size).attempt.fits for size in (697, 683, 682, 512)}
    assert fits == {697: True, 683: False, 682: True, 512: True}
    listener = Listener()
    found, largest = limit_of_plan(ThisProcess(setup), limit, BATCH, listener)
    assert 512 <= largest < 683
    assert listener.sizes == [683]
    assert listener.notes == [
        "a micro-batch of 683 does not fit although 697 does, because the allocator cuts its memory in "
        "another way: the batch is split into more"
    ]
    assert found.probe.micro_batch == 697
    assert found.probe.oom_count == limit.probe.oom_count + 1
    assert [one.fits for one in found.probe.attempts] == [*(one.fits for one in limit.probe.attempts), False]


@pytest.mark.parametrize("batch", [697, 2 * 697, 1200, 5])
def test_parts_that_fit_are_not_run(setup: Setup, limit: Limit, batch: int) -> None:
    listener = Listener()
    assert limit_of_plan(ThisProcess(setup), limit, batch, listener) == (limit, 697)
    assert listener.sizes == []


def test_a_part_that_is_doubted_and_runs_is_kept(
    setup: Setup, limit: Limit, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = ThisProcess(setup)
    monkeypatch.setattr(process, "call", lambda *_, **__: attempt(setup, 512))
    found, largest = limit_of_plan(process, limit, BATCH, Listener())
    assert (largest, found.probe.oom_count) == (697, limit.probe.oom_count)


def test_what_no_replay_knows_and_what_real_batches_have_shown_is_not_doubted(
    setup: Setup, limit: Limit, tmp_path: Path
) -> None:
    real = RealBatches(batches=3, by="run", micro_batch_alone=697, is_exact=True)
    checked = limit._replace(probe=msgspec.structs.replace(limit.probe, real_batches=real))
    smaller = Options().with_values(device="sim:t4", memory_budget="4MiB")
    process = ThisProcess(open_setup(WORKLOADS["mlp-heavy"](), smaller))
    for doubtless in (limit._replace(footprint=None), checked):
        assert limit_of_plan(ThisProcess(setup), doubtless, BATCH, Listener()) == (doubtless, 697)
    # In this budget, the replay refuses the limit as well.
    assert limit_of_plan(process, limit, BATCH, Listener()) == (limit, 697)
