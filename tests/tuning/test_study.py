"""Storages of studies: opened, refused, and left by a process that is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from autobatch import InputError
from autobatch.tuning.study import check_storage
from tests.support.rank_server import RankServer
from tests.support.trials import AXES, FakeTrials, search, speed_of


@pytest.mark.parametrize(
    ("storage", "said"),
    [
        ("FOLDER", "IsADirectoryError"),
        ("nothing://there", "dialect|Could not parse|plugin"),
        ("postgresql://user:secret@127.0.0.1:9/x", r"postgresql://user:…@127.0.0.1:9/x"),
        ("mysql+nodriver://user:secret@/x", "nodriver"),
    ],
)
def test_a_storage_that_cannot_be_opened_is_invalid_input_of_one_line(
    tmp_path: Path, storage: str, said: str
) -> None:
    with pytest.raises(InputError, match=said) as found:
        check_storage(storage.replace("FOLDER", str(tmp_path)))
    assert "\n" not in str(found.value)
    assert "secret" not in str(found.value)


def test_the_lock_of_a_journal_is_an_absolute_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Optuna reads a lock's age through the link, and waits forever if it cannot be resolved."""
    links: list[Any] = []
    real = os.symlink
    monkeypatch.setattr(os, "symlink", lambda target, path: links.append(target) or real(target, path))
    monkeypatch.chdir(tmp_path)
    search(axes=AXES[:1], budget=1, storage="deep/s.log")
    assert links
    assert {Path(target) for target in links} == {tmp_path / "deep" / "s.log"}


def search_through_kills(storage: str) -> tuple[int, Any, list[Any]]:
    """Search in processes each of which is killed in a later trial than the one before, until one ends."""
    kills = 0
    while child := os.fork():
        status = os.waitpid(child, 0)[1]
        if status != signal.SIGKILL:
            found = search(axes=AXES[:2], budget=8, storage=storage).tuning
            return kills, found.best, [trial.parameters for trial in found.history]
        kills += 1
    left = [10 + 8 * kills]

    def speed(values: Any) -> float:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return speed_of(values)

    try:
        search(FakeTrials(speed), AXES[:2], budget=8, storage=storage)
    finally:
        os._exit(0)


@pytest.mark.parametrize("storage", ["{}/s.log", pytest.param("sqlite:///{}/s.db", marks=pytest.mark.slow)])
def test_a_search_that_is_killed_in_its_trials_keeps_the_others(
    server: RankServer, storage: str, tmp_path: Path
) -> None:
    ((kills, best, history),) = server.values(search_through_kills, storage.format(tmp_path), world=1)
    assert kills >= 2
    assert len(history) == len({str(values) for values in history})
    assert speed_of(best) == max(map(speed_of, history))
