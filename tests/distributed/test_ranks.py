"""One process, which asks nobody; and the place of a rank, as its environment describes it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autobatch import InputError
from autobatch.distributed.launch import fail_before_joining, open_ranks
from autobatch.distributed.ranks import Ranks, read_launch, write_error_file

ENVIRON = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "1234",
}


@pytest.mark.parametrize("environ", [{}, {"WORLD_SIZE": "1", "RANK": "0"}])
def test_one_process_answers_itself(environ: dict[str, str], tmp_path: Path) -> None:
    ranks = open_ranks(environ)
    assert (ranks.rank, ranks.world, ranks.restart, ranks.earlier_out) == (0, 1, 0, None)
    assert ranks.gather({"a": 1}) == [{"a": 1}]
    assert ranks.broadcast("text") == "text"
    assert ranks.once(lambda: 3) == 3
    assert [ranks.agree(flag) for flag in (True, False)] == [True, False]
    assert ranks.device("cuda") == "cuda"
    ranks.check_equal({"--seed": 0})
    ranks.limit_wait(1.0)
    ranks.enter(tmp_path)
    assert ranks.fail("a line", 2) is None
    ranks.close()


def test_one_process_imports_no_torch() -> None:
    code = (
        "import sys; from autobatch.distributed.launch import open_ranks; open_ranks({}).close(); "
        "assert 'torch' not in sys.modules, 'torch'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_rank_that_was_started_otherwise_is_named() -> None:
    class Three(Ranks):
        def gather(self, value: Any) -> list[Any]:
            return [value, value, {"--seed": 1}]

    with pytest.raises(InputError, match=r"differ in --seed: rank 2 has 1, and rank 0 has 0\. Start all"):
        Three().check_equal({"--seed": 0})


def test_the_environment_of_torchrun_is_read() -> None:
    launch = read_launch(
        {**ENVIRON, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    )
    assert launch is not None
    assert (launch.rank, launch.world, launch.local_rank, launch.local_world) == (5, 8, 1, 4)
    assert (launch.address, launch.port, launch.has_agent_store, launch.restart) == ("host", 1234, True, 2)


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
        read_launch(environ)
    assert fail_before_joining(environ, "line", is_common=True)


def test_a_rank_that_fails_alone_reports_it_and_torchrun_reads_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "error.json"
    environ = {"WORLD_SIZE": "2", "MASTER_ADDR": "host", "TORCHELASTIC_ERROR_FILE": str(path)}
    for rank, is_common, reports in ((0, True, True), (1, True, False), (1, False, True)):
        assert fail_before_joining({**environ, "RANK": str(rank)}, "line", is_common=is_common) == reports
    found = json.loads(path.read_text())
    assert found["message"] == "line"
    assert found["timestamp"].isdecimal()
    write_error_file(None, "without torchrun nothing is written")

    def full(*_: object, **__: object) -> None:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    write_error_file(path, "one line")
    assert not path.exists()
