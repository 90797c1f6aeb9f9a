"""Trackers of ``--log``: stand-ins with the calls of the real libraries, and those where installed."""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from autobatch import InputError, Progress, StepRecord, fit
from autobatch.cli import main as cli
from tests.support.probes import Listener
from tests.support.rank_server import RankServer
from tests.support.runs import rows
from tests.support.training import make_workload, points

NAMES = ("tensorboard", "wandb", "mlflow")
INTERVAL = "autobatch.training.trackers.WRITE_INTERVAL_S"
"""Least time between two steps that are logged."""
OPTIONS: dict[str, Any] = {
    "target_batch": 8, "trials": 0, "device": "cpu", "memory_budget": "1GiB", "progress": False,
}  # fmt: skip


class Libraries:
    """Stand-ins of all libraries, whose runs are kept by their identifiers."""

    def __init__(self) -> None:
        self.rows: dict[str, list[tuple[int, dict[str, float]]]] = {}
        self.opened: list[dict[str, Any]] = []
        self.ends: list[Any] = []
        self.numbers = itertools.count(1)

    def log(self, name: str, values: dict[str, float], step: int) -> None:
        self.rows.setdefault(name, []).append((step, dict(values)))

    def steps(self, name: str = "training/learning_rate") -> list[list[int]]:
        """Return the steps of a curve in the order in which they were logged, for each run."""
        return [[step for step, values in rows if name in values] for rows in self.rows.values()]

    def modules(self) -> Iterator[tuple[str, Any]]:
        """Yield what stands for each module."""
        libraries = self

        class WandbRun:
            def __init__(self, identifier: str) -> None:
                self.identifier, self.summary = identifier, {}

            def log(self, data: dict[str, Any], step: int | None = None) -> None:
                assert step is not None
                libraries.log(self.identifier, data, step)

            def finish(self, exit_code: int | None = None) -> None:
                libraries.ends.append((exit_code, self.summary))

        def wandb_init(
            *, project: str, name: str, id: str, resume: str | None, config: dict[str, Any], dir: str
        ) -> WandbRun:
            libraries.opened.append({"project": project, "config": config, "resume": resume})
            return WandbRun(id)

        yield "wandb", SimpleNamespace(init=wandb_init)

        class MlflowClient:
            def get_experiment_by_name(self, name: str) -> Any:
                assert name == "workload"
                return SimpleNamespace(experiment_id="e") if libraries.rows else None

            def create_experiment(self, name: str) -> str:
                return "e"

            def create_run(self, experiment_id: str, *, run_name: str | None = None) -> Any:
                assert experiment_id == "e"
                return SimpleNamespace(info=SimpleNamespace(run_id=f"r{next(libraries.numbers)}"))

            def update_run(self, run_id: str, status: str | None = None) -> None:
                assert (run_id in libraries.rows, status) == (True, "RUNNING")

            def log_batch(
                self, run_id: str, metrics: Any = (), params: Any = (), synchronous: bool | None = None
            ) -> Any:
                if params:
                    assert len(params) <= 100, "as many as a batch may have"
                    config = {one.key: one.value for one in params}
                    libraries.opened.append({"project": "workload", "config": config})
                if metrics:
                    libraries.log(run_id, {one.key: one.value for one in metrics}, metrics[0].step)
                return SimpleNamespace(wait=lambda: libraries.ends.append("waited"))

            def log_dict(self, run_id: str, dictionary: dict[str, Any], artifact_file: str) -> None:
                libraries.ends.append((artifact_file, dictionary))

            def set_terminated(self, run_id: str, status: str | None = None) -> None:
                libraries.ends.append(status)

        def metric(key: str, value: float, timestamp: int, step: int) -> Any:
            assert timestamp > 10**12, "in milliseconds"
            return SimpleNamespace(key=key, value=value, step=step)

        def param(key: str, value: str) -> Any:
            return SimpleNamespace(key=key, value=value)

        entities = SimpleNamespace(Metric=metric, Param=param)
        yield "mlflow", SimpleNamespace(MlflowClient=MlflowClient, entities=entities, __path__=[])
        yield "mlflow.entities", entities

        class SummaryWriter:
            def __init__(self, folder: str, purge_step: int) -> None:
                assert Path(folder).name == "tensorboard"
                libraries.opened.append({"purge_step": purge_step})
                rows = libraries.rows.get("tensorboard", [])  # as TensorBoard reads the events of a folder
                libraries.rows["tensorboard"] = [row for row in rows if row[0] < purge_step]

            def add_scalar(self, tag: str, value: float, step: int) -> None:
                libraries.log("tensorboard", {tag: value}, step)

            def close(self) -> None:
                libraries.ends.append("closed")

        yield "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=SummaryWriter)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Libraries:
    """Install the stand-ins, and log every step however quick it is."""
    found = Libraries()
    for name, module in found.modules():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    monkeypatch.setattr(INTERVAL, 0.0)
    return found


class Failing(Progress):
    """A listener that raises after the third step of a first process."""

    def stepped(self, step: StepRecord, of: int) -> None:
        if step.step == 3:
            raise RuntimeError("the power is gone")


CURVES = {
    "training/loss": "loss",
    "training/learning_rate": "learning_rate",
    "training/gradient_norm": "grad_norm",
    "speed/samples_per_s": "samples_per_s",
    "speed/items_per_s": "items_per_s",
    "memory/micro_batch": "micro_batch",
    "memory/oom_recoveries": "oom_recoveries",
}


@pytest.mark.filterwarnings("default")
def test_a_resumed_run_continues_its_logs_without_doubled_steps(
    libraries: Libraries, tmp_path: Path, no_pictures: None
) -> None:
    out = tmp_path / "run"
    options = OPTIONS | {"out": out, "steps": 6, "checkpoint_every": 2, "log": [*NAMES, "wandb"]}
    options["storage"] = f"sqlite:///{tmp_path}/a-password"
    workload = make_workload(train_data=points(24), validation_data=points(8))
    with pytest.raises(RuntimeError, match="the power is gone"):
        fit(workload, **options | {"progress": Failing()})
    assert libraries.steps() == [[1, 2, 3]] * 3
    assert {end for end in libraries.ends if isinstance(end, str)} == {
        "closed",
        "FAILED",
        "waited",
    }
    result = fit(workload, **options, resume=True)
    assert libraries.steps() == [[1, 2, 3, 4, 5, 6]] * 3
    configs = [one["config"] for one in libraries.opened if "config" in one]
    assert len(configs) == 3, "Wandb is opened twice"
    assert {str(one["target_batch"]) + one["lr_rule"] for one in configs} == {"8none"}
    assert "a-password" not in str(configs)
    last = rows(out)[-1]
    expected = {curve: last[field] for curve, field in CURVES.items()}
    expected["validation/loss"] = result.training.validation["loss"]
    for logged in libraries.rows.values():
        found = {tag: value for step, values in logged if step == 6 for tag, value in values.items()}
        assert found == pytest.approx(expected)
    assert (0, msgspec.to_builtins(result.training)) in libraries.ends
    fit(workload, **options)
    assert len(libraries.rows) == 5, "a new run of each tracker, of which TensorBoard has a folder"


def test_quick_steps_are_thinned_out_except_notable_ones_and_the_last(
    libraries: Libraries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(INTERVAL, 3600.0)
    workload = make_workload(train_data=points(24), validation_data=points(8))
    fit(workload, **OPTIONS, steps=9, validate_every=4, out=tmp_path, log=["wandb"])
    assert libraries.steps() == [[1, 4, 8, 9]]


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_library_is_one_line_before_anything_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None)
    ran: list[object] = []
    with pytest.raises(InputError, match=rf"--log {name} needs the package {name}.*: pip install {name}$"):
        fit(make_workload(model=lambda: ran.append(1)), **OPTIONS, log=[name])
    assert not ran
    assert cli.run(["fit", "--target-batch", "8", "--log", name, "--out", "run"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_library_that_refuses_the_run_ends_it_before_the_first_step(
    libraries: Libraries, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(**_: Any) -> None:
        raise PermissionError("no API key is configured")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    workload = make_workload(train_data=points(24))
    with pytest.raises(InputError, match=r"--log wandb cannot open the run \(PermissionError: no API key"):
        fit(workload, **OPTIONS, steps=2, out=tmp_path / "run", log=["mlflow", "wandb"])
    assert not (tmp_path / "run/metrics.jsonl").exists()
    assert libraries.ends == ["FAILED"], "what was opened before is closed"


def test_a_tracker_that_fails_later_is_named_and_left_out(libraries: Libraries, tmp_path: Path) -> None:
    def fail(*_: Any) -> None:
        raise ConnectionError("the server is gone")

    libraries.log = fail  # type: ignore[method-assign]
    heard = Listener()
    options = OPTIONS | {"steps": 2, "out": tmp_path, "log": ["wandb"], "progress": heard}
    assert fit(make_workload(train_data=points(24)), **options).training.optimizer_steps == 2
    assert [note for note in heard.notes if "sink" in note] == [
        "wandb.step raised ConnectionError: the server is gone. The run continues without this sink"
    ]


def logged_by_rank(out: str) -> list[list[int]]:
    """Train two steps over the ranks with a tracker, and return the steps that this rank has logged."""
    found = Libraries()
    sys.modules.update(found.modules())
    fit(make_workload(train_data=points(24)), **OPTIONS, steps=2, out=out, log=["wandb"])
    return found.steps()


@pytest.mark.distributed
def test_rank_0_alone_logs(server: RankServer, tmp_path: Path) -> None:
    assert server.values(logged_by_rank, str(tmp_path / "run")) == [[[1, 2]], []]


@pytest.mark.program
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore")
def test_the_real_library_keeps_each_step_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pictures: None
) -> None:
    """Two processes, of which the second resumed after step 2 although step 3 was logged."""
    pytest.importorskip(name, exc_type=ImportError)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # wandb leaves files there
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setattr(INTERVAL, 0.0)
    out = tmp_path / "run"
    options = OPTIONS | {"out": out, "steps": 6, "checkpoint_every": 2, "log": [name]}
    with pytest.raises(RuntimeError, match="the power is gone"):
        fit(make_workload(), **options | {"progress": Failing()})
    fit(make_workload(), **options, resume=True)
    (identifier,) = msgspec.json.decode((out / "trackers.json").read_bytes()).values()
    if name == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(out / "tensorboard"))
        events.Reload()
        found = [(one.step, one.value) for one in events.Scalars("training/loss")]
    elif name == "mlflow":
        import mlflow

        history = mlflow.MlflowClient().get_metric_history(identifier, "training/loss")
        found = [(one.step, one.value) for one in history]
        assert mlflow.MlflowClient().get_run(identifier).info.status == "FINISHED"
    else:
        assert len(list(out.glob(f"wandb/offline-run-*-{identifier}"))) == 2
        return
    assert [step for step, _ in found] == [1, 2, 3, 4, 5, 6]
    assert [value for _, value in found] == pytest.approx([row["loss"] for row in rows(out)])
