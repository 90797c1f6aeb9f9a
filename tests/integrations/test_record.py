"""The command ``record``: the program's own words, signals and exit code, and when its memory is written.

Torch is a stand-in whose snapshots name what had happened, so that no GPU is needed; `tests/gpu` has the
real one.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import autobatch
from autobatch.cli import main as cli
from tests.support.commandline import command, environment
from tests.support.leftovers import wait_until
from tests.support.stand_in_torch import install

PROGRAM = """
import sys, time, torch
from torch.optim.optimizer import Optimizer
optimizer = Optimizer()
for _ in range(3):
    optimizer.step()
print("trained", *sys.argv[1:], flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    install(tmp_path)
    return tmp_path


def started(
    folder: Path, *own: str, program: str = PROGRAM, rest: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Start ``record … -- python program.py`` with the stand-in for torch."""
    (folder / "program.py").write_text(program, encoding="utf-8")
    paths = os.pathsep.join([str(folder / "lib"), str(Path(autobatch.__file__).parents[1])])
    return subprocess.Popen(
        command("record", "--out", "out.pickle", *own, "--", sys.executable, "program.py", *rest),
        cwd=folder,
        env=environment(folder, PYTHONPATH=paths),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def written(path: Path) -> Any:
    return pickle.loads(path.read_bytes())


def test_the_memory_is_written_at_the_end_and_the_words_are_untouched(folder):
    (folder / "out.pickle").write_text("of an earlier recording")
    process = started(folder, rest=["--help", "--", "--out", "x y", "{}", "*"])
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "trained --help -- --out x y {} *\n")
    assert "wrote " in err
    content = written(folder / "out.pickle")
    assert content["done"] == ["step"] * 3
    assert content["how"]["stacks"] == "python"
    assert content["how"]["context"] == "alloc"


CATCHES = "try:\n    torch.run_out(1)\nexcept torch.OutOfMemoryError:\n    optimizer.step()\nsys.exit(4)"


@pytest.mark.parametrize(
    ("ending", "code", "done"),
    [("sys.exit(7)", 7, 3), ("raise ValueError('x')", 1, 3), ("os._exit(9)", 9, 0), (CATCHES, 4, 3)],
)
def test_the_exit_code_is_that_of_the_command(folder, ending, code, done):
    """An error out of memory is written at once, and the program goes on."""
    process = started(folder, program=f"{PROGRAM}\nimport os\n{ending}\n")
    process.communicate(timeout=60)
    assert process.returncode == code
    assert (folder / "out.pickle").exists() == bool(done)
    assert not done or written(folder / "out.pickle")["done"] == ["step"] * done


@pytest.mark.parametrize("words", [("--steps", "2"), ("--seconds", "1")])
def test_it_is_written_after_some_steps_or_seconds_and_the_program_goes_on(folder, words):
    go_on = "\nimport os\nwhile not os.path.exists('go'): time.sleep(0.05)\noptimizer.step(); sys.exit(5)\n"
    process = started(folder, *words, program=PROGRAM + go_on)
    wait_until((folder / "out.pickle").exists, "it is not written")
    assert process.poll() is None
    steps = 2 if "--steps" in words else 3
    assert written(folder / "out.pickle")["done"] == ["step"] * steps
    (folder / "go").touch()
    process.communicate(timeout=60)
    assert process.returncode == 5
    assert written(folder / "out.pickle")["done"] == ["step"] * steps


def test_each_process_has_a_file(folder):
    """Of another rank, and of the same one, as `torch.multiprocessing.spawn` starts them."""
    others = "\nimport os, subprocess\nif len(sys.argv) < 2:\n    for rank in '10':\n"
    others += "        environ = {**os.environ, 'RANK': rank}\n"
    others += "        subprocess.run([sys.executable, __file__, rank], env=environ, check=True)\n"
    process = started(folder, program=PROGRAM + others)
    process.communicate(timeout=60)
    assert process.returncode == 0
    files = sorted(folder.glob("out*.pickle"))
    assert len(files) == 3
    assert {folder / "out.pickle", folder / "out-rank1.pickle"} < {*files}
    assert len({file.read_bytes() for file in files}) == 1


def test_a_command_that_cannot_be_started_is_told(capsys):
    assert cli.run(["record", "--out", "a.pickle", "--", "no-such-program"]) == 2
    assert "no-such-program cannot be started" in capsys.readouterr().err
