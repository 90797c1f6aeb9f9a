"""Whole runs over ranks, which ``--ranks N`` or torchrun starts, and the ends of their ranks."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autobatch.distributed.launch import end_of, torchrun_of
from tests.support.commandline import SMALL, Ran, run

pytestmark = [pytest.mark.distributed, pytest.mark.skipif(sys.platform == "win32", reason="a shell script")]
WORKLOAD = f"""
import os, pathlib
{SMALL}
RANK, IS_AGAIN = os.environ.get("RANK", "0"), "AUTOBATCH_EARLIER_OUT" in os.environ
STEPS = pathlib.Path("run/metrics.jsonl")

def steps():
    return STEPS.read_text().count("\\n") if STEPS.exists() else 0

def struck(model, batch):
    EXTRA
    return loss(model, batch)

def workload():
    model = lambda: torch.nn.Sequential(torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))
    return small(model=model, loss=struck, optimizer=lambda params, rate: torch.optim.AdamW(params, lr=rate))
"""
FIT = [
    "fit", "work.py", "--out", "run", "--target-batch", "14", "--memory-budget", "1GiB", "--trials", "0",
    "--max-micro-batch", "4", "--checkpoint-every", "1",
]  # fmt: skip


def failed(exitcode: int, timestamp: int = 0) -> Any:
    """Return the end of a rank, as torch reports it."""
    return SimpleNamespace(exitcode=exitcode, timestamp=timestamp, error_file_data={"out": None})


@pytest.mark.parametrize(
    ("failures", "code", "named"),
    [
        ({0: failed(2), 1: failed(-signal.SIGTERM)}, 2, None),
        ({0: failed(143), 1: failed(3)}, 3, None),
        ({0: failed(1, 4), 1: failed(-signal.SIGKILL)}, 1, "rank 1 was ended by SIGKILL"),
        ({0: failed(77), 1: failed(-signal.SIGKILL, 30)}, 77, None),
        ({0: failed(143), 1: failed(-signal.SIGTERM)}, 143, None),
    ],
)
def test_a_killed_rank_is_the_cause_unless_torch_has_killed_it(
    failures: Any, code: int, named: str | None
) -> None:
    ended = end_of(failures)
    assert ended.code == code
    assert (ended.line or "").partition(":")[0] == (named or "")


def test_the_command_of_several_hosts_says_where_they_meet() -> None:
    environ = {"WORLD_SIZE": "8", "MASTER_ADDR": "head", "MASTER_PORT": "29400", "GROUP_WORLD_SIZE": "2"}
    expected = "torchrun --nnodes 2 --node-rank N --master-addr head --master-port 29400 --nproc-per-node 4"
    assert torchrun_of({**environ, "LOCAL_WORLD_SIZE": "4"}) == expected
    assert torchrun_of({"WORLD_SIZE": "8"}) == "torchrun --nproc-per-node 8"


def fit(
    folder: Path, *options: str, extra: str = "pass", launcher: tuple[str, ...] = (), ranks: int = 2
) -> Ran:
    """Train on ranks, which the command starts if there is no other launcher."""
    (folder / "work.py").write_text(WORKLOAD.replace("EXTRA", extra))
    words = [*(launcher or [sys.executable]), "-m", "autobatch", *FIT, *options]
    return run(folder, [*words, *([] if launcher else ["--ranks", str(ranks)])], timeout=240)


@pytest.mark.slow
def test_out_of_memory_in_the_step_starts_the_ranks_again_in_smaller_micro_batches(tmp_path: Path) -> None:
    extra = (
        "if RANK == '1' and not IS_AGAIN and steps() == 2: "
        "torch.optim.AdamW.step = lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError('no memory'))"
    )
    ran = fit(tmp_path, "--steps", "5", "--json", extra=extra)
    assert ran.code == 0, ran.err
    assert ran.json["plan"]["world_size"] == 2
    assert ran.json["training"]["resumed_from"] is not None
    assert "out of memory" in ran.err


@pytest.mark.program
def test_a_killed_rank_ends_all_and_the_user_is_told(tmp_path: Path) -> None:
    """Of four ranks, one exchanges nothing with the killed one, and must not be named beside it."""
    kill = "RANK == '1' and steps() > 3 and os.kill(os.getpid(), 9)"
    ran = fit(tmp_path, "--steps", "40", extra=kill, ranks=4)
    assert ran.code == 1
    assert "rank 1 was ended by SIGKILL" in ran.err
    verdict = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert (verdict["rank"] != 1, verdict["code"]) == (True, 1)
    assert verdict["line"].startswith("rank 1 ended")
    again = fit(tmp_path, "--steps", "40", "--resume", ranks=4)
    assert again.code == 0, again.err
    assert not (tmp_path / "run" / "verdict.json").exists()


@pytest.mark.slow
def test_torchrun_restarts_all_from_the_newest_checkpoint(tmp_path: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    steps, weights = ("--steps", "8", "--json"), tmp_path / "run" / "model.safetensors"
    ran = fit(tmp_path, *steps, launcher=torchrun)
    assert ran.code == 0, ran.err
    expected = weights.read_bytes()
    (tmp_path / "run").rename(tmp_path / "first")
    kill = (
        "if RANK == '1' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and steps() >= 3: "
        "os.kill(os.getpid(), 9)"
    )
    ran = fit(tmp_path, *steps, extra=kill, launcher=(*torchrun, "--max-restarts", "2"))
    assert ran.code == 0, ran.err
    assert ran.json["plan"]["world_size"] == 2
    command = ran.json["command"]
    assert command.startswith("torchrun --nproc-per-node 2 -m autobatch fit work.py --out run")
    assert ran.json["training"]["resumed_from"] is not None
    assert weights.read_bytes() == expected
