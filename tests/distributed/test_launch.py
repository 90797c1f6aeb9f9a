"""The rules of a launch: what the environment must say, and which device a rank opens."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from autobatch.core.errors import InputError
from autobatch.distributed.launch import (
    check_equal,
    check_gpus,
    read_launch,
    write_error_file,
)

ENVIRON = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "1234",
}


def test_the_environment_of_torchrun_is_read() -> None:
    launch = read_launch(
        {**ENVIRON, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    )
    assert launch is not None
    assert (launch.rank, launch.world, launch.local_rank, launch.local_world) == (5, 8, 1, 4)
    assert (launch.address, launch.port, launch.has_agent_store, launch.restart) == ("host", 1234, True, 2)


@pytest.mark.parametrize("environ", [{}, {"WORLD_SIZE": "1", "RANK": "0"}])
def test_one_process_trains_alone(environ: dict[str, str]) -> None:
    assert read_launch(environ) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "8"}, "RANK is 8 and WORLD_SIZE is 8: a rank is between 0 and 7"),
        ({"RANK": ""}, "RANK must be a number of at least 0, it is not set: start the ranks with torchrun"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is 0: a run has at least one rank"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT must be between 1 and 65535, found 99999"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE must be a number of at least 0, found 'many'"),
    ],
)
def test_an_invalid_environment_is_named(change: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        read_launch({**ENVIRON, **change})


def test_ranks_without_a_meeting_point_are_refused() -> None:
    with pytest.raises(InputError, match="MASTER_ADDR is not set, so the ranks cannot meet"):
        read_launch({"WORLD_SIZE": "2", "RANK": "0"})


def test_ranks_never_share_a_gpu() -> None:
    with pytest.raises(InputError, match=r"ranks 0 and 2 share one GPU of b"):
        check_gpus([("b", "x"), ("a", "x"), ("b", "x")])
    check_gpus([("b", "x"), ("b", "y"), ("c", "x"), ("d", None), ("d", None)])


def test_a_rank_that_was_started_otherwise_is_named() -> None:
    with pytest.raises(InputError, match=r"differ in --seed: rank 2 has 1, and rank 0 has 0\. Start all"):
        check_equal([{"--seed": 0}, {"--seed": 0}, {"--seed": 1}])
    check_equal([{"--seed": 0}, {"--seed": 0}])


def test_torchrun_reads_the_line_of_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    write_error_file(path, "one line")
    found = json.loads(path.read_text())
    assert found["message"] == "one line"
    assert found["timestamp"].isdecimal()
    write_error_file(None, "without torchrun nothing is written")


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"

    def full(*_: object, **__: object) -> None:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    write_error_file(path, "one line")
    assert not path.exists()
