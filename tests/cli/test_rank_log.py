"""The log of a rank that does not print."""

from __future__ import annotations

from pathlib import Path

from autobatch.cli.rank_log import RankLog
from autobatch.core.records.device import DeviceRecord
from autobatch.core.records.probe import Attempt


def test_a_rank_writes_what_it_does_once_the_folder_is_known(tmp_path: Path) -> None:
    log = RankLog(3)
    log.opened(DeviceRecord(kind="cpu", name="a CPU", total_bytes=9, budget_bytes=5, budget_source="as set"))
    log.enter(tmp_path)
    attempt = Attempt(
        micro_batch=4, fits=False, peak_allocated_bytes=1, peak_reserved_bytes=1, seconds=1, reason="full"
    )
    log.attempted(attempt)
    lines = (tmp_path / "ranks" / "rank-3.log").read_text().splitlines()
    assert lines == ["device a CPU, budget 5 bytes (as set)", "a micro-batch of 4 full"]


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    blocked = tmp_path / "ranks"
    blocked.write_text("a file in the place of the folder")
    log = RankLog(1)
    log.note("before the folder is known")
    log.enter(tmp_path)
    log.note("lost")
    assert blocked.read_text() == "a file in the place of the folder"
    blocked.unlink()
    log.note("written again")
    assert (blocked / "rank-1.log").read_text() == "written again\n"
