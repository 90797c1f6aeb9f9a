"""Probe and plan over ranks, with a batch of all of them that a fake runs."""

from __future__ import annotations

from typing import Any

import pytest

from autobatch.api import probe_stage
from autobatch.api.confirm import JointLimits, JointSettings
from autobatch.api.context import RunContext
from autobatch.core.errors import DoesNotFitError
from autobatch.core.records.probe import RankLimit
from autobatch.distributed.ranks import Alone
from autobatch.setup.child import ThisProcess
from autobatch.setup.setup import SetupSettings, open_setup
from tests.support.options import as_options
from tests.support.training import make_workload


class Second(Alone):
    """The second of two ranks."""

    rank, world = 1, 2

    def gather(self, value: Any) -> list[Any]:
        return [value, value]


def probe(monkeypatch: pytest.MonkeyPatch, limits: list[int], **options: Any) -> Any:
    """Probe up to four samples on the second of two ranks, of which so many fit over all ranks."""
    found = [RankLimit(rank=n, host="h", device="d", kind=n, limit=one) for n, one in enumerate(limits)]
    monkeypatch.setattr(probe_stage, "confirmed_limits", lambda *_: JointLimits(found, [], "no reason"))
    process = ThisProcess(open_setup(make_workload(), SetupSettings(device="cpu", memory_budget="1GiB")))
    asked = as_options("probe", max_micro_batch=4, **options)
    return probe_stage.probe_only(process, asked, RunContext(ranks=Second()), JointSettings()).probe


def test_a_limit_that_a_batch_of_all_ranks_has_lowered_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = probe(monkeypatch, [4, 4])
    assert (kept.micro_batch, kept.upper_bound_by, kept.over_ranks_skipped) == (4, "cap", "no reason")
    lowered = probe(monkeypatch, [4, 3])
    assert (lowered.micro_batch, lowered.upper_bound_by) == (3, None)
    assert [one.limit for one in lowered.ranks] == [4, 3]


def test_a_size_that_does_not_fit_over_all_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe(monkeypatch, [2, 2], micro_batch=2).source == "asked"
    with pytest.raises(DoesNotFitError, match="fits on each rank alone, but not in a batch over 2 ranks"):
        probe(monkeypatch, [1, 2], micro_batch=2)
