"""The limits of ranks are lowered until a batch of all ranks fits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autobatch.api import confirm
from autobatch.core.errors import DoesNotFitError
from autobatch.core.progress import Progress
from autobatch.core.records.probe import Attempt, RankLimit
from autobatch.distributed.ranks import Alone, Ranks

PLACE = object()


class Two(Alone):
    """The first of two ranks; the other never runs out of memory."""

    world = 2

    def gather(self, value: Any) -> list[Any]:
        return [value, None]


class Notes(Progress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)


def attempt(size: int, reason: str | None, *, fits: bool) -> Attempt:
    return Attempt(
        micro_batch=size,
        fits=fits,
        peak_allocated_bytes=None,
        peak_reserved_bytes=None,
        seconds=0.1,
        reason=reason,
        world=2,
    )


def of_both(ranks: Ranks, limit: int, device: Any) -> list[RankLimit]:
    return [RankLimit(rank=rank, host="a", device="b", kind=0, limit=limit) for rank in range(2)]


def one_each(limits: list[RankLimit]) -> list[list[int]]:
    return [[one.limit] for one in limits]


def confirmed(
    monkeypatch: pytest.MonkeyPatch,
    largest: int,
    limit: int,
    *,
    replaceable: bool = True,
    crashes: bool = False,
) -> tuple[confirm.JointLimits, list[str]]:
    """Confirm a plan on ranks that fit so many samples at a time."""

    def run(process: object, place: object, batch: Any) -> Attempt:
        assert place is PLACE
        size = max(batch.sizes())
        if crashes:
            return attempt(size, None, fits=False)
        return attempt(size, None if size <= largest else "no memory", fits=size <= largest)

    monkeypatch.setattr(confirm, "meeting_place", lambda ranks: PLACE)
    monkeypatch.setattr(confirm, "run_joint_batch", run)
    monkeypatch.setattr(confirm, "limits_over_ranks", of_both)
    device = SimpleNamespace(budget_bytes=2**30)
    process: Any = SimpleNamespace(
        is_replaceable=replaceable, reason="it trains here", info=SimpleNamespace(device=device)
    )
    notes = Notes()
    found = confirm.confirmed_limits(process, one_each, limit, confirm.JointSettings(), Two(), notes)
    return found, notes.lines


def test_a_plan_that_fits_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    found, notes = confirmed(monkeypatch, 64, 64)
    assert found.limits[0].limit == 64
    assert [one.fits for one in found.attempts] == [True]
    assert notes == []


def test_a_micro_batch_shrinks_by_an_eighth_until_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    found, notes = confirmed(monkeypatch, 50, 64)
    assert [one.micro_batch for one in found.attempts] == [64, 56, 49]
    assert found.limits[0].limit == 49
    assert notes[0].startswith("out of memory on rank 0 in a batch over all ranks (no memory)")


def test_not_even_one_sample_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DoesNotFitError, match="fits on this rank alone, but not in a batch over 2 ranks in"):
        confirmed(monkeypatch, 0, 2)


def test_a_process_that_cannot_be_replaced_runs_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    found, notes = confirmed(monkeypatch, 0, 64, replaceable=False)
    assert (found.attempts, found.skipped) == ([], "it trains here")
    assert notes[0].startswith(
        "no batch over all ranks ran before the training: it trains here. autobatch fit"
    )
    assert found.limits[0].limit == 64


def test_a_child_that_ends_for_another_reason_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    found, notes = confirmed(monkeypatch, 64, 64, crashes=True)
    assert found.limits[0].limit == 64
    assert found.skipped == "a child ended"
    assert notes == ["no batch over all ranks ran before the training, because a child ended"]
