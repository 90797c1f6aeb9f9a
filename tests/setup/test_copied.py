"""A copy of this process that tries a workload of functions that no pickle carries."""

from __future__ import annotations

import multiprocessing
import os
from functools import partial
from typing import Any

import pytest
import torch

import autobatch
from autobatch.core.errors import InputError
from autobatch.setup import copied
from autobatch.setup.child import ChildCrashed, ChildProcess, Session, ThisProcess
from autobatch.setup.open_process import open_process
from autobatch.setup.setup import SetupSettings
from tests.support.rank_server import RankServer
from tests.support.training import make_workload

SETTINGS = SetupSettings(device="cpu", memory_budget="1GiB", world=2)


def process_number(session: Session) -> int:
    return os.getpid()


def die(session: Session) -> None:
    os.kill(os.getpid(), 9)


def gradient(session: Session) -> bool:
    torch.ones((), requires_grad=True).backward()
    return True


@pytest.fixture(autouse=True)
def copies() -> None:
    """Trace in copies, as a run does."""


@pytest.mark.usefixtures("real_copies")
def test_a_copy_opens_the_workload_and_is_replaced_after_a_crash() -> None:
    told: list[int] = []

    def model() -> torch.nn.Module:
        told.append(os.getpid())
        return torch.nn.Linear(5, 3).double()

    with ChildProcess(None, SETTINGS, start=partial(copied.start_copy, make_workload(model=model))) as child:
        first = child.call("a look", process_number)
        assert first != os.getpid()
        assert child.call("a backward pass", gradient)
        with pytest.raises(ChildCrashed, match="SIGKILL"):
            child.call("a crash", die)
        child.restart()
        assert child.call("a look", process_number) not in (first, os.getpid())
    assert told == []  # its model was built in the copies


@pytest.mark.usefixtures("real_copies")
def test_an_error_of_the_workload_comes_from_the_copy() -> None:
    wrong = make_workload(model=lambda: 3)
    with (
        pytest.raises(InputError, match="returned a int, not a torch"),
        ChildProcess(None, SETTINGS, start=partial(copied.start_copy, wrong)),
    ):
        pass


def test_a_process_that_cannot_be_copied_opens_the_workload_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autobatch.setup.open_process.why_not_copied", lambda: copied.NO_COPY)
    with open_process(make_workload(), SETTINGS, isolated=False) as process:
        assert isinstance(process, ThisProcess)
        assert process.reason == copied.NO_COPY


def test_a_copy_that_autograd_refuses_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise RuntimeError("Unable to handle autograd's threading\nin a fork")

    monkeypatch.setattr(torch.Tensor, "backward", refuses)
    with open_process(make_workload(), SETTINGS, isolated=False) as process:
        assert not process.is_replaceable
        assert process.reason.endswith("trained before: Unable to handle autograd's threading")


def plan(parallel: str) -> Any:
    """Plan over ranks that may be copied."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    codes, stop = [], ChildProcess._stop

    def noting(self: ChildProcess, **more: float) -> int | None:
        codes.append(stop(self, **more))
        return codes[-1]

    ChildProcess._stop = noting  # type: ignore[method-assign]  # in a rank, which ends with the case
    made = make_workload(model=lambda: torch.nn.Linear(5, 3), loss=float_loss)
    found = autobatch.plan(
        made,
        target_batch=8,
        max_micro_batch=2,
        own_loop=False,
        device="cpu",
        memory_budget="1GiB",
        parallel=parallel,  # type: ignore[arg-type]
    )
    return [(one.fits, one.world, one.micro_batch) for one in found.probe.over_ranks], found.probe, codes


def float_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0].float()).square().mean()


@pytest.mark.distributed
@pytest.mark.parametrize("parallel", ["replicate", pytest.param("shard", marks=pytest.mark.program)])
def test_a_library_call_runs_a_batch_over_all_ranks(server: RankServer, parallel: str) -> None:
    for attempts, probe, codes in server.values(plan, parallel):
        assert attempts == [(True, 2, 2)]
        assert codes == [0]  # its copy left by itself, which has none of the threads of its groups
        assert probe.over_ranks_skipped is None
