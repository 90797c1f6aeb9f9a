"""Files that other processes read: none is opened to write under its own name, so none is read in part."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import autobatch
from autobatch.distributed.launch import open_ranks
from tests.support.rank_server import RankServer
from tests.support.training import make_workload, points

GROWING = {"metrics.jsonl"}
"""Files that grow by whole lines; their readers leave out a last line without an end."""


@contextmanager
def opened_to_write() -> Iterator[set[Path]]:
    """Collect the paths that this process opens to write within the block, whoever opens them."""
    opened, is_over = set[Path](), False

    def hear(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and not is_over:
            path, _, flags = args
            if isinstance(path, str | bytes | os.PathLike) and flags & (os.O_WRONLY | os.O_RDWR):
                opened.add(Path(os.fsdecode(path)).absolute())

    sys.addaudithook(hear)  # it cannot be removed
    yield opened
    is_over = True


def files_of(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def test_a_run_writes_each_of_its_files_under_another_name(tmp_path: Path, own_home: Path) -> None:
    out = tmp_path / "run"
    workload = make_workload(validation_data=points(9, seed=5))
    options = {"target_batch": 8, "device": "cpu", "trials": 0, "ema": 0.5}
    with opened_to_write() as opened:
        autobatch.fit(workload, out=out, steps=4, checkpoint_every=2, **options)  # type: ignore[arg-type]
        autobatch.fit(workload, out=out, steps=6, resume=True, **options)  # type: ignore[arg-type]
    published = files_of(out) | files_of(own_home)
    assert {"result.json", "report.html", "model.safetensors", "manifest.json", "state.pt"} <= {
        path.name for path in published
    }
    assert {path.name for path in published & opened} == GROWING | {".lock"}
    assert opened - published, "it has opened other names"


def fail_on_a_rank(out: str) -> list[str]:
    """Fail on rank 1, then on rank 0; return the files opened under their own names."""
    with opened_to_write() as opened:
        ranks = open_ranks(os.environ, 60)
        ranks.enter(Path(out), Path(out, "mark"))
        while not (ranks.rank or (Path(out) / "verdict.json").exists()):
            time.sleep(0.01)
        ranks.fail("wrong", 1)
    return sorted(path.name for path in files_of(Path(out)) & opened)


@pytest.mark.distributed
def test_a_rank_writes_its_verdict_and_the_cause_under_another_name(
    server: RankServer, tmp_path: Path
) -> None:
    files = {rank: {"TORCHELASTIC_ERROR_FILE": str(tmp_path / f"error-{rank}.json")} for rank in range(2)}
    for ended in server.run(fail_on_a_rank, str(tmp_path), of_rank=files, seconds=60):
        assert (ended.code, ended.value) == (0, []), ended.error
    assert json.loads((tmp_path / "verdict.json").read_text())["line"] == "wrong"
    assert json.loads((tmp_path / "error-1.json").read_text())["message"] == "wrong"
