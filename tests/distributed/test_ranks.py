"""The place of a rank, as its environment describes it, and failures before the ranks have met."""

from __future__ import annotations

import json
import re
import resource
from pathlib import Path

import pytest

from autobatch import InputError
from autobatch.distributed.launch import fail_before_joining, open_ranks

ENVIRON = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "1234",
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "8"}, "RANK is 8 and WORLD_SIZE is 8: a rank is between 0 and 7"),
        ({"RANK": ""}, "RANK must be a number of at least 0, it is not set: start the ranks with torchrun"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE must be a number of at least 1, found '0'"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT must be a number from 1 to 65535, found '99999'"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE must be a number of at least 1, found 'many'"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not set, so the ranks cannot meet"),
    ],
)
def test_an_invalid_environment_is_named(change: dict[str, str | None], message: str) -> None:
    environ = {name: value for name, value in {**ENVIRON, **change}.items() if value is not None}
    with pytest.raises(InputError, match=re.escape(message)):
        open_ranks(environ)
    assert fail_before_joining(environ, "line", is_common=True)


def test_a_rank_that_fails_alone_reports_it_and_torchrun_reads_the_line(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    environ = {"WORLD_SIZE": "2", "MASTER_ADDR": "host", "TORCHELASTIC_ERROR_FILE": str(path)}
    for rank, is_common, reports in ((0, True, True), (1, True, False), (1, False, True)):
        assert fail_before_joining({**environ, "RANK": str(rank)}, "line", is_common=is_common) == reports
    found = json.loads(path.read_text())
    assert found["message"] == "line"
    assert found["timestamp"].isdecimal()


def test_a_full_disk_leaves_no_part_of_the_cause(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "host", "TORCHELASTIC_ERROR_FILE": str(path)}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        assert fail_before_joining(environ, "one line", is_common=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [*tmp_path.iterdir()] == []
