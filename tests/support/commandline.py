"""The command as a user starts it: a process of its own, seen from outside."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

SMALL = """
import torch
from torch.utils.data import TensorDataset
from autobatch import Workload

def data(samples=32):
    torch.manual_seed(0)
    return TensorDataset(torch.randn(samples, 4), torch.randn(samples, 1))

def loss(model, batch):
    inputs, targets = batch
    return torch.nn.functional.mse_loss(model(inputs), targets)

def small(**fields):
    return Workload(**{
        "name": "small",
        "model": lambda: torch.nn.Linear(4, 1),
        "train_data": data(),
        "loss": loss,
        "optimizer": lambda params, learning_rate: torch.optim.SGD(params, lr=learning_rate),
        "learning_rate": 0.01,
        **fields,
    })

def workload():
    return small()
"""
"""A module with a workload that probes and trains in well under a second."""


class Ran(NamedTuple):
    """A process that ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output, which is one JSON object and nothing else."""
        return json.loads(self.out)


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """The variables of a child: a home and temporary files of its own, one thread, nothing of ours."""
    (folder / "tmp").mkdir(exist_ok=True)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("AUTOBATCH_")}
    return inherited | {
        "AUTOBATCH_HOME": str(folder / "home"),
        "XDG_CONFIG_HOME": str(folder / "config"),
        "TMPDIR": str(folder / "tmp"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "80",
        **variables,
    }


def command(*arguments: object) -> list[str]:
    """The words that start the command."""
    return [sys.executable, "-m", "autobatch", *map(str, arguments)]


def run(folder: Path, words: Sequence[str], timeout: float = 120, **variables: str) -> Ran:
    """Run a program in a folder, and wait for its end."""
    done = subprocess.run(
        words,
        cwd=folder,
        env=environment(folder, **variables),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def autobatch(folder: Path, *arguments: object, timeout: float = 120, **variables: str) -> Ran:
    """Run the command in a folder, and wait for its end."""
    return run(folder, command(*arguments), timeout, **variables)


def printed(folder: Path, program: object, *arguments: object) -> str:
    """Run ``autobatch``, or a script of Python, in a folder, and return all that it prints."""
    start = command() if program == "autobatch" else [sys.executable, str(program)]
    done = run(folder, [*start, *map(str, arguments)], timeout=300)
    assert done.code == 0, done.err
    return done.err + done.out


class ATerminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True
