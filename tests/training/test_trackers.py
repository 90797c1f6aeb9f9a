"""Trackers of ``--log``: stand-ins with the calls of the real libraries, and those where installed."""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autobatch import InputError, Progress, StepRecord, fit
from autobatch.cli import main as cli
from autobatch.training import trackers
from autobatch.training.metrics import Metrics
from autobatch.training.run_folder import move_earlier_run
from autobatch.training.trackers import LoggedRun, Tracker, open_trackers
from tests.support.rank_server import RankServer
from tests.support.sample_run import a_run, a_step
from tests.support.training import make_workload, points

NAMES = ("tensorboard", "wandb", "mlflow", "trackio")
INTERVAL_S = 0.2
"""Least time between two steps that are logged."""


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

        class TrackioRun(WandbRun):
            def finish(self) -> None:  # type: ignore[override]
                libraries.ends.append("finished")

        def trackio_init(
            project: str, name: str, config: dict[str, Any], resume: str = "never"
        ) -> TrackioRun:
            assert (resume == "never") == (name not in libraries.rows)
            libraries.opened.append({"project": project, "config": config})
            return TrackioRun(name)

        yield "trackio", SimpleNamespace(init=trackio_init)

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
                self.file_writer = self
                assert Path(folder).name == "tensorboard"
                libraries.opened.append({"purge_step": purge_step})
                rows = libraries.rows.get("tensorboard", [])  # as TensorBoard reads the events of a folder
                libraries.rows["tensorboard"] = [row for row in rows if row[0] < purge_step]

            def add_summary(self, summary: Any, step: int) -> None:
                libraries.log("tensorboard", {one.tag: one.simple_value for one in summary.value}, step)

            def close(self) -> None:
                libraries.ends.append("closed")

        class Summary(SimpleNamespace):
            Value = SimpleNamespace

        for name in ("tensorboard", "tensorboard.compat", "tensorboard.compat.proto"):
            yield name, SimpleNamespace(__path__=[])
        yield "tensorboard.compat.proto.summary_pb2", SimpleNamespace(Summary=Summary)
        yield "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=SummaryWriter)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Libraries:
    """Install the stand-ins, and log every step however quick it is."""
    found = Libraries()
    for name, module in found.modules():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    monkeypatch.setattr(trackers, "WRITE_INTERVAL_S", 0.0)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_tracker_gets_every_known_value_the_settings_and_the_end(
    name: str, libraries: Libraries, tmp_path: Path
) -> None:
    run = LoggedRun(folder=tmp_path, project="workload", settings={"target_batch": 1024})
    (sink,) = open_trackers([name, name], run)
    record = a_step(9, samples_per_s=30.0, loss=None, validation={"loss": 0.25, "accuracy": None})
    for step in (a_step(8), record):
        sink.step(step)
    sink.end(a_run().training)
    sink.close()
    curves = {
        "training/learning_rate": "learning_rate",
        "training/gradient_norm": "grad_norm",
        "speed/samples_per_s": "samples_per_s",
        "memory/peak_allocated_bytes": "peak_allocated_bytes",
        "memory/peak_reserved_bytes": "peak_reserved_bytes",
        "memory/micro_batch": "micro_batch",
        "memory/oom_recoveries": "oom_recoveries",
    }
    expected = {curve: getattr(record, field) for curve, field in curves.items()}
    expected = {curve: value for curve, value in expected.items() if value is not None}
    ((first, second, last),) = libraries.rows.values()
    assert (first[0], second) == (8, (9, expected | {"validation/loss": 0.25}))
    assert last == (9, {"validation/accuracy": 0.9312})
    if name != "tensorboard":
        (opened,) = libraries.opened
        assert opened["project"] == "workload"
        assert {key: str(one) for key, one in opened["config"].items()} == {"target_batch": "1024"}
    ends = {
        "tensorboard": lambda end: end == "closed",
        "wandb": lambda end: end[0] == 0 and end[1]["optimizer_steps"] == 120,
        "mlflow": lambda end: end == "FINISHED",
        "trackio": lambda end: end == "finished",
    }
    assert ends[name](libraries.ends[-1])
    assert move_earlier_run(tmp_path) is not None
    assert not (tmp_path / "trackers.json").exists(), "a new run in the folder is a new run of the tracker"


def test_quick_steps_are_thinned_out_except_notable_ones_and_the_last(libraries: Libraries) -> None:
    times = itertools.count()
    writer = trackers.Wandb(LoggedRun(folder=Path("run"), project="workload"), None)
    sink = Tracker("wandb", writer, clock=lambda: next(times) * 0.15 * INTERVAL_S)
    trackers.WRITE_INTERVAL_S = INTERVAL_S  # the fixture restores it
    notable = {10: {"recovered": "no memory"}, 12: {"validation": {"loss": 0.5}}, 13: {"applied": False}}
    for step in range(1, 31):
        sink.step(a_step(step, **{"recovered": None, **notable.get(step, {})}))
    sink.close()
    assert libraries.steps() == [[1, 8, 10, 12, 13, 20, 27, 30]]
    assert libraries.ends == [(1, {})], "a run without a summary has failed"


OPTIONS: dict[str, Any] = {
    "target_batch": 8, "trials": 0, "device": "cpu", "memory_budget": "1GiB", "progress": False,
}  # fmt: skip


class Failing(Progress):
    """A listener that raises after the third step of a first process."""

    def stepped(self, step: StepRecord, of: int) -> None:
        if step.step == 3:
            raise RuntimeError("the power is gone")


@pytest.mark.program
@pytest.mark.filterwarnings("default")
def test_a_resumed_run_continues_its_logs_without_doubled_steps(
    libraries: Libraries, tmp_path: Path, no_pictures: None
) -> None:
    options = OPTIONS | {"out": tmp_path / "run", "steps": 6, "checkpoint_every": 2, "log": NAMES}
    options["storage"] = f"sqlite:///{tmp_path}/a-password"
    workload = make_workload(train_data=points(24), validation_data=points(8))
    with pytest.raises(RuntimeError, match="the power is gone"):
        fit(workload, **options | {"progress": Failing()})
    assert libraries.steps() == [[1, 2, 3]] * 4
    fit(workload, **options, resume=True)
    assert libraries.steps() == [[1, 2, 3, 4, 5, 6]] * 4
    assert libraries.steps("validation/loss") == [[6]] * 4
    configs = [one["config"] for one in libraries.opened if "config" in one]
    assert len(configs) == 5, "Wandb and Trackio are opened twice"
    assert {str(one["target_batch"]) + one["lr_rule"] for one in configs} == {"8none"}
    assert "a-password" not in str(configs)


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
    err = capsys.readouterr().err
    assert err.startswith(f"autobatch: --log {name} needs the package")
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_library_that_refuses_the_run_ends_it_before_the_first_step(
    libraries: Libraries, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(**_: Any) -> None:
        raise PermissionError("no API key is configured")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    workload = make_workload(train_data=points(24))
    with pytest.raises(InputError, match=r"--log wandb cannot open the run \(PermissionError: no API key"):
        fit(workload, **OPTIONS, steps=2, out=tmp_path / "run", log=["trackio", "wandb"])
    assert not (tmp_path / "run/metrics.jsonl").exists()
    assert libraries.ends == ["finished"], "what was opened before is closed"


def test_a_tracker_that_fails_later_is_named_and_left_out(libraries: Libraries, tmp_path: Path) -> None:
    def fail(*_: Any) -> None:
        raise ConnectionError("the server is gone")

    libraries.log = fail  # type: ignore[method-assign]
    notes: list[str] = []
    sinks = open_trackers(["wandb"], LoggedRun(folder=tmp_path, project="workload"))
    metrics = Metrics(None, sinks, note=notes.append)
    for step in (1, 2):
        metrics.step(a_step(step))
    assert notes == [
        "wandb.step raised ConnectionError: the server is gone. The run continues without this sink"
    ]


def logged_by_rank(out: str) -> list[list[int]]:
    """Train two steps over the ranks with a tracker, and return the steps that this rank has logged."""
    found = Libraries()
    sys.modules.update(found.modules())
    trackers.WRITE_INTERVAL_S = 0.0
    fit(make_workload(train_data=points(24)), **OPTIONS, steps=2, out=out, log=["wandb"])
    return found.steps()


@pytest.mark.distributed
def test_rank_0_alone_logs(server: RankServer, tmp_path: Path) -> None:
    assert server.values(logged_by_rank, str(tmp_path / "run")) == [[[1, 2]], []]


@pytest.mark.program
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore")
def test_the_real_library_keeps_each_step_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes, of which the second resumed after step 2 although step 4 was logged."""
    pytest.importorskip(name, exc_type=ImportError)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # wandb leaves files there
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    times = itertools.count()
    for seen, logged, last in ((0, 0, 4), (2, 4, 6)):
        run = LoggedRun(folder=tmp_path, project="p", settings={"a": 1}, batches_seen=seen, logged=logged)
        (sink,) = open_trackers([name], run)
        sink._clock = lambda: float(next(times))  # type: ignore[attr-defined]
        for step in range(seen + 1, last + 1):
            sink.step(a_step(step, loss=float(step)))
        sink.end(a_run().training)
        sink.close()
    (identifier,) = trackers.msgspec.json.decode((tmp_path / "trackers.json").read_bytes()).values()
    if name == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        found = [(one.step, one.value) for one in events.Scalars("training/loss")]
    elif name == "mlflow":
        import mlflow

        history = mlflow.MlflowClient().get_metric_history(identifier, "training/loss")
        found = [(one.step, one.value) for one in history]
        assert mlflow.MlflowClient().get_run(identifier).info.status == "FINISHED"
    elif name == "trackio":
        from trackio.sqlite_storage import SQLiteStorage

        rows = SQLiteStorage.get_logs("p", identifier)
        found = [(one["step"], one["training/loss"]) for one in rows if "training/loss" in one]
    else:
        assert len(list(tmp_path.glob(f"wandb/offline-run-*-{identifier}"))) == 2
        return
    assert found == [(step, float(step)) for step in range(1, 7)]
