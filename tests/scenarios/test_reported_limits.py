"""Limits that users have reported: a size that does not run, and what is said of one that does."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest

import autobatch
from tests.support.commandline import SMALL
from tests.support.probes import Listener, work
from tests.support.ragged import Sequences, pad, ragged_workload
from tests.support.rank_server import RankServer


@pytest.mark.parametrize("limit", [None, 8])
def test_samples_that_cannot_be_split_by_size_are_split_by_count(limit: int | None) -> None:
    """A batch of None alone cannot be collated, and no run has one: any 8 samples in a row have others."""
    holes, texts = (13, 29, 31, 45, 46, 55, 57), Sequences(64)
    workload = ragged_workload(
        train_data=[None if index in holes else texts[index] for index in range(64)],
        collate=lambda samples: pad([sample for sample in samples if sample is not None]),
        size_of=lambda sample: 0 if sample is None else len(sample[0]),
    )
    listener = Listener()
    options = {"target_batch": 32, "device": "cpu", "memory_budget": "64MiB", "max_micro_batch": limit}
    plan = autobatch.plan(workload, progress=listener, **options)
    assert (plan.split, sum(plan.micro_batches), plan.micro_batch) == ("count", 32, limit or 32)
    assert [note for note in listener.notes if "split by count" in note]


@pytest.mark.parametrize("is_shown", [True, False])
def test_a_folder_where_nothing_was_probed_has_no_saved_limit(
    tmp_path: Path, is_shown: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two projects may have a file of the same name."""
    caplog.set_level(logging.INFO, "autobatch")
    listener = Listener()
    mine = SMALL.replace('"name": "small",', "")
    theirs = mine.replace("Linear(4, 1)", "Linear(4, 1, bias=False)")
    for folder, source in ((tmp_path / "mine", mine), (tmp_path / "theirs", theirs)):
        folder.mkdir()
        (folder / "train.py").write_text(source)
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(folder)
        monkeypatch.delitem(sys.modules, "train", raising=False)
        caplog.clear()
        autobatch.probe(
            "train.py", device="cpu", memory_budget="64MiB", progress=listener if is_shown else False
        )
    assert not [line for line in (*listener.notes, *caplog.messages) if "saved on" in line]


def probe_of_rank(budgets: tuple[str, str]) -> tuple[int, str]:
    """Return the limit of this rank and what is said of it."""
    found = autobatch.probe(work(), device="cpu", memory_budget=budgets[int(os.environ["RANK"])])
    return found.micro_batch, str(found)


@pytest.mark.distributed
def test_ranks_whose_limits_differ_all_tell_the_least(server: RankServer, own_home: Path) -> None:
    def probe(*budgets: str) -> list[tuple[int, str]]:
        environ = {"AUTOBATCH_HOME": str(own_home / "-".join(budgets))}
        return server.values(probe_of_rank, budgets, environ=environ, seconds=60.0)

    (expected, _), _ = probe("40KiB", "40KiB")
    for limit, said in probe("80KiB", "40KiB"):
        assert limit == expected
        assert f" {limit} samples" in said
        assert "on others" not in said
        assert "None" not in said
