"""The examples run as a user runs them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.sample_run import a_run, a_step

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(folder: Path, *command: str) -> str:
    environ = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_workload_is_planned_from_the_command_line(tmp_path: Path) -> None:
    words = ("--target-batch", "256", "--memory-budget", "300KiB", "--device", "cpu", "--json")
    found = json.loads(run(tmp_path, "-m", "autobatch", "plan", f"{EXAMPLES / 'train.py'}:workload", *words))
    sizes = found["plan"]["micro_batches"]
    assert sum(sizes) == 256
    assert len(sizes) > 1, "the budget of the example makes the batch accumulate"


def test_the_own_loop_takes_exact_batches(tmp_path: Path) -> None:
    printed = run(tmp_path, str(EXAMPLES / "own_loop.py"))
    samples = [int(one) for one in re.findall(r"^step \d+: (\d+) samples", printed, re.MULTILINE)]
    assert samples[:-1] == [256] * (len(samples) - 1)
    assert sum(samples) == 2000, "two epochs of 1,000 samples"
    losses = [float(one) for one in re.findall(r"loss ([\d.]+)$", printed, re.MULTILINE)]
    assert losses[-1] < losses[0]


def test_sinks_hand_known_numbers_to_a_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trackers are stand-ins with the calls of their documentation."""
    seen: dict[str, list[object]] = {"wandb": [], "mlflow": [], "aim": []}

    def stub(name: str, **members: object) -> None:
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**members))

    wandb_run = SimpleNamespace(
        log=lambda values, step: seen["wandb"].append((step, values)),
        summary={},
        finish=lambda: seen["wandb"].append("finish"),
    )
    stub("wandb", init=lambda project, **_: wandb_run)
    stub(
        "mlflow",
        set_experiment=seen["mlflow"].append,
        start_run=lambda **_: None,
        log_metrics=lambda values, step: seen["mlflow"].append((step, values)),
        log_dict=lambda values, path: seen["mlflow"].append(path),
        end_run=lambda: seen["mlflow"].append("end"),
    )

    class AimRun(dict):  # type: ignore[type-arg]
        def __init__(self, experiment: str) -> None:
            super().__init__()

        def track(self, value: float, name: str, step: int) -> None:
            seen["aim"].append((step, name, value))

        def close(self) -> None:
            seen["aim"].append("close")

    stub("aim", Run=AimRun)
    spec = importlib.util.spec_from_file_location("example_sinks", EXAMPLES / "sinks.py")
    assert spec is not None
    assert spec.loader is not None
    sinks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sinks)
    for sink in (sinks.WandbSink("p"), sinks.MlflowSink("p"), sinks.AimSink("p")):
        sink.step(a_step(3, validation={"accuracy": 0.9, "x": None}))
        sink.end(a_run().training)
        sink.close()
    (step, values), end = seen["wandb"]
    assert (step, end) == (3, "finish")
    assert values["held_out/accuracy"] == 0.9  # type: ignore[index]
    assert "held_out/x" not in values  # type: ignore[operator]
    assert values["micro_batch"] == 86  # type: ignore[index]
    assert seen["mlflow"] == ["p", (3, values), "training.json", "end"]
    assert {name: value for _, name, value in seen["aim"][:-1]} == values  # type: ignore[misc]
    assert wandb_run.summary["optimizer_steps"] == 120  # type: ignore[index]
