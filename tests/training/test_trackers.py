"""Trackers of ``--log``: stand-ins with the calls of the real libraries, and those where installed."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autobatch.cli import main as cli
from autobatch.training.metrics import CURVES
from tests.support.runs import fit, fit_until, rows
from tests.support.training import make_workload, points

NAMES = ("tensorboard", "wandb", "mlflow")


class Libraries:
    """Stand-ins of all libraries, whose runs are kept by their identifiers."""

    def __init__(self) -> None:
        self.rows: dict[str, list[tuple[int, dict[str, float]]]] = {}
        self.configs: list[dict[str, Any]] = []
        self.ends: list[Any] = []
        numbers, current = itertools.count(1), [""]

        def wandb_init(*, project: str, name: str, id: str, resume: str, config: Any, dir: str) -> Any:
            self.configs.append(config)
            return SimpleNamespace(
                log=lambda data, step: self.log(id, data, step),
                finish=lambda exit_code: self.ends.append(exit_code),  # noqa: PLW0108 - by keyword
            )

        def start_run(run_id: str | None = None, run_name: str | None = None) -> Any:
            current[0] = run_id or f"r{next(numbers)}"
            return SimpleNamespace(info=SimpleNamespace(run_id=current[0]))

        def log_metrics(metrics: Any, step: int, synchronous: bool) -> None:
            self.log(current[0], metrics, step)

        def summary_writer(folder: str, purge_step: int) -> Any:
            assert Path(folder).name == "tensorboard"
            kept = [row for row in self.rows.get("tensorboard", []) if row[0] < purge_step]
            self.rows |= {"tensorboard": kept} if kept else {}
            return SimpleNamespace(
                add_scalar=lambda tag, value, step: self.log("tensorboard", {tag: value}, step),
                close=lambda: self.ends.append("closed"),
            )

        self.modules = {
            "wandb": SimpleNamespace(init=wandb_init),
            "mlflow": SimpleNamespace(
                set_experiment=lambda name: None,
                start_run=start_run,
                log_params=self.configs.append,
                log_metrics=log_metrics,
                end_run=self.ends.append,
            ),
            "torch.utils.tensorboard": SimpleNamespace(SummaryWriter=summary_writer),
        }

    def log(self, name: str, values: dict[str, float], step: int) -> None:
        self.rows.setdefault(name, []).append((step, dict(values)))

    def steps(self) -> list[list[int]]:
        """Return the steps of a curve in the order in which they were logged, for each run."""
        name = "training/learning_rate"
        return [[step for step, values in rows if name in values] for rows in self.rows.values()]


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Libraries:
    """Install the stand-ins."""
    found = Libraries()
    for name, module in found.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return found


@pytest.mark.filterwarnings("default")
def test_a_resumed_run_continues_its_logs_without_doubled_steps(
    libraries: Libraries, tmp_path: Path, no_pictures: None
) -> None:
    options = {"target_batch": 8, "steps": 6, "checkpoint_every": 2, "log": [*NAMES, "wandb"]}
    workload = make_workload(train_data=points(24), validation_data=points(8))
    fit_until(3, workload, tmp_path / "run", **options)
    assert libraries.steps() == [[1, 2, 3]] * 3
    assert {*libraries.ends} == {"closed", 1, "FAILED"}
    libraries.rows["tensorboard"].pop()  # a run that is killed has not written its newest events
    result, _ = fit(workload, tmp_path / "run", **options, resume=True)
    assert libraries.steps() == [[1, 2, 3, 4, 5, 6]] * 3
    assert {*libraries.ends} == {"closed", 1, "FAILED", 0, "FINISHED"}
    assert {str(config["target_batch"]) + config["lr_rule"] for config in libraries.configs} == {"8none"}
    last = rows(tmp_path / "run")[-1]
    expected = {curve: last[field] for curve, field in CURVES.items() if last[field] is not None}
    expected["validation/loss"] = result.training.validation["loss"]
    for logged in libraries.rows.values():
        found = {tag: value for step, values in logged if step == 6 for tag, value in values.items()}
        assert found == pytest.approx(expected)
    fit(workload, tmp_path / "run", **options)
    assert len(libraries.rows) == 5, "a new run of each tracker, of which TensorBoard has a folder"


def test_a_missing_library_is_one_line_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert cli.run(["fit", "--target-batch", "8", "--log", "wandb", "--out", "run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install wandb" in line
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_fails_later_is_named_and_left_out(libraries: Libraries, tmp_path: Path) -> None:
    libraries.log = {}.pop  # type: ignore[method-assign]
    result, notes = fit(make_workload(), tmp_path, target_batch=8, steps=2, log=["wandb"])
    assert result.training.optimizer_steps == 2
    (note,) = [note for note in notes if "sink" in note]
    assert note.startswith("wandb.step raised TypeError")
