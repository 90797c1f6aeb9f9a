"""The speed of training on a GPU: against a loop written by hand, and tuned."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import autobatch
from benchmarks import ragged
from benchmarks.gpu.commands import ROOT, fresh_home
from benchmarks.gpu.device import GPU, NAME
from benchmarks.gpu.workloads import CASES

WARM = 3
ROUNDS = {"mlp": "60", "transformer": "400"}
"""Rounds of each case of the loops, a quarter of a minute on a fast GPU."""


def loops(name: str, precision: str) -> dict[str, Any]:
    """Return the time of the loops of autobatch ÷ that of one by hand: the median over rounds in turn."""
    asked = {
        "cases": name, "precisions": precision, "sources": "joined",
        "works": "adam, clipped", "rounds": ROUNDS[name],
    }  # fmt: skip
    words = [word for option, value in asked.items() for word in (f"--{option}", value)]
    # In a process of its own, because a run of `fit` keeps its cap until the end.
    with fresh_home() as environ:
        said = subprocess.run(
            [sys.executable, "-m", "benchmarks.loop.run", "--no-save", *words],
            env=environ, cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
    rows = [line.split(" | ") for line in said.splitlines() if line.startswith(f"| {name} ")]
    return {"workload": f"{name} {precision}", "wall": {row[4]: float(row[7].strip(" |")) for row in rows}}


def timed(step: Callable[[], object], rounds: int) -> list[float]:
    """Return the seconds of every step after the first ones, each waited for."""
    seconds = []
    for _ in range(WARM + rounds):
        torch.cuda.synchronize(GPU)
        start = time.perf_counter()
        step()
        torch.cuda.synchronize(GPU)
        seconds.append(time.perf_counter() - start)
    return seconds[WARM:]


def by_size(lengths: str) -> dict[str, Any]:
    """Return the time of training on samples of many lengths, split by size ÷ split by count."""
    with tempfile.TemporaryDirectory() as folder:
        _, seconds, by_count, by_size, gradient = ragged.measure(lengths, 1, Path(folder))
    return {"lengths": lengths, "by_size": seconds, "padding": [by_count, by_size], "gradient": gradient}


def tuned(name: str, target: int, trials: int, seconds: float) -> dict[str, Any]:
    """Tune, and return what it gains over every knob at its default."""
    case, limits = CASES[name], {"trials": trials, "timeout": seconds}
    options = {"device": NAME, "target_batch": target, "progress": False, **limits, **case.options}
    found = autobatch.tune(case.make(), **options).tuning
    assert found is not None
    return {"workload": name, "best": found.best, "gain": found.low, "trials": found.trials}
