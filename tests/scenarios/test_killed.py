"""A run that is killed again and again ends with the same weights as an uninterrupted run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support import killing
from tests.support.rank_server import RankServer


def killed(folder: Path, kills: int, fed: bool) -> dict[str, int]:
    return [*killing.kill(folder, kills, 1, fed=fed)][-1]


@pytest.mark.program
@pytest.mark.parametrize(("kills", "fed"), [(20, False), (6, True)])
def test_kills_lose_no_acknowledged_checkpoint_whatever_the_number_of_loader_workers(
    kills: int, fed: bool, tmp_path: Path, server: RankServer
) -> None:
    (result,) = server.values(killed, tmp_path, kills, fed, world=1, seconds=600)
    assert result["killed"] >= kills
    assert result["finished"] >= 1


def test_a_call_without_words_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import runpy

    monkeypatch.setattr(sys, "argv", ["killing"])
    with pytest.raises(SystemExit, match=r"usage: .* FOLDER KILLS SEED"):
        runpy.run_path(killing.__file__, run_name="__main__")
