"""A run that is killed again and again ends with the same weights as an uninterrupted run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.killing import kill
from tests.support.rank_server import RankServer


@pytest.mark.program
@pytest.mark.parametrize(("kills", "fed"), [(20, False), (6, True)])
def test_kills_lose_no_acknowledged_checkpoint_whatever_the_number_of_loader_workers(
    kills: int, fed: bool, tmp_path: Path, server: RankServer
) -> None:
    ((killed, ended),) = server.values(kill, tmp_path, kills, 1, fed, world=1, seconds=600)
    assert killed >= kills
    assert ended >= 1
