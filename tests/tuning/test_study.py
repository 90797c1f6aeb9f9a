"""Storages of studies: opened, shared, refused, and failing."""

from __future__ import annotations

import json
import os
import resource
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest

from autobatch import InputError, Progress
from autobatch.core.records import Trial, Tuning
from autobatch.tuning.configuration import Measurement, StorageFailed
from autobatch.tuning.study import check_storage
from tests.support.rank_server import RankServer
from tests.support.trials import SMALL_AXES, all_points, exact, search, speed_of


@pytest.mark.parametrize(
    ("storage", "said"),
    [
        ("FOLDER", "IsADirectoryError"),
        ("nothing://there", "dialect|Could not parse|plugin"),
        ("postgresql://user:secret@127.0.0.1:9/x", r"postgresql://user:…@127.0.0.1:9/x of the study failed"),
        ("mysql+nodriver://user:secret@/x", "nodriver"),
        ("grpc://127.0.0.1:9", "grpc"),
    ],
)
def test_a_storage_that_cannot_be_opened_gives_an_error_of_one_line(
    tmp_path: Path, storage: str, said: str
) -> None:
    location = storage.replace("FOLDER", str(tmp_path))
    for act in (lambda: search(storage=location), lambda: check_storage(location)):
        with pytest.raises(InputError, match=said) as found:
            act()
        assert "\n" not in str(found.value)
        assert "secret" not in str(found.value)


def test_the_lock_of_a_journal_is_an_absolute_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Optuna reads a lock's age through the link, and waits forever if it cannot be resolved."""
    links = []
    real = os.symlink
    monkeypatch.setattr(os, "symlink", lambda target, path: links.append(target) or real(target, path))
    monkeypatch.chdir(tmp_path)
    search(axes=SMALL_AXES, trials=1, storage="deep/s.log")
    assert links
    assert {Path(target) for target in links} == {tmp_path / "deep" / "s.log"}


def search_through_kills(storage: str, acknowledged: Path) -> tuple[int, Any, list[Any]]:
    """Search in processes each of which is killed in a later trial than the one before, until one ends."""

    class Acknowledging(Progress):
        def measured(self, trial: Trial, of: int, changes: Any) -> None:
            with acknowledged.open("a") as file:
                print(json.dumps(trial.parameters), file=file)

    def run(last: int) -> Tuning:
        asked: list[Any] = []

        def measure(values: Any) -> Measurement:
            asked.append(values)
            if len(asked) == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return exact(values)

        return search(measure, SMALL_AXES, trials=8, storage=storage, progress=Acknowledging()).tuning

    kills = 0
    while child := os.fork():
        status = os.waitpid(child, 0)[1]
        if status != signal.SIGKILL:
            assert status == 0
            found = run(100)
            return kills, found.best, [one.parameters for one in found.history]
        kills += 1
    try:
        run(2 + kills)
    finally:
        os._exit(0)


@pytest.mark.parametrize("storage", ["{}/s.log", pytest.param("sqlite:///{}/s.db", marks=pytest.mark.slow)])
def test_a_search_that_is_killed_in_its_trials_keeps_the_others(
    server: RankServer, storage: str, tmp_path: Path
) -> None:
    acknowledged = tmp_path / "acknowledged"
    arguments = storage.format(tmp_path), acknowledged
    ((kills, best, history),) = server.values(search_through_kills, *arguments, world=1)
    assert kills >= 3
    assert [json.loads(line) for line in acknowledged.read_text().splitlines()] == history
    assert sorted(history, key=str) == sorted(all_points(SMALL_AXES), key=str)
    assert speed_of(best) == max(map(speed_of, history))


def test_a_study_made_for_something_else_is_rejected_with_the_differences(tmp_path: Path) -> None:
    storage = str(tmp_path / "s.log")
    search(trials=1, storage=storage, made_for={"model": "a", "target_batch": 64})
    with pytest.raises(InputError) as found:
        search(trials=1, storage=storage, made_for={"model": "b", "target_batch": 64})
    assert (
        f"the study 'study' in {storage} was made for something else: model is 'b' here and 'a' there"
        in str(found.value)
    )
    with pytest.raises(InputError, match=r"checkpointing is None here and .* Choose another --study"):
        search(axes=SMALL_AXES, trials=1, storage=storage, made_for={"model": "a", "target_batch": 64})
    assert "\n" not in str(found.value)
    journal = optuna.storages.journal.JournalFileBackend(str(tmp_path / "other.log"))
    study = optuna.create_study(study_name="study", storage=optuna.storages.JournalStorage(journal))
    study.tell(study.ask(), 1.0)
    with pytest.raises(InputError, match="made for something else"):
        search(trials=1, storage=str(tmp_path / "other.log"))


def _locked(path: Path) -> sqlite3.Connection:
    lock = sqlite3.connect(path)
    lock.execute("BEGIN EXCLUSIVE")
    return lock


def _full(path: Path) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, most))


STRIKES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a locked database": ("sqlite:///{}?timeout=0.1", _locked, "OperationalError: database is locked"),
    "an emptied database": ("sqlite:///{}", lambda path: path.write_bytes(b""), "no such table|malformed"),
    "a deleted database": ("sqlite:///{}", Path.unlink, "OperationalError: .*readonly database"),
    "a deleted journal": ("{}", Path.unlink, "FileNotFoundError: .*No such file"),
    "a journal on a full disk": ("{}", _full, "OSError: .*File too large"),
    "a journal of something else": ("{}", lambda path: path.write_bytes(b"x" * 5000), "JSONDecodeError"),
}


@pytest.mark.parametrize("name", STRIKES)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_storage_that_is_struck_in_the_middle_names_the_cause_and_what_to_do(
    tmp_path: Path, name: str
) -> None:
    url, strike, said = STRIKES[name]
    path, held, before = tmp_path / "s", [], resource.getrlimit(resource.RLIMIT_FSIZE)

    def measure(values: Any) -> Measurement:
        if not held:
            held.append(strike(path))
        return exact(values)

    try:
        with pytest.raises(StorageFailed, match=said) as caught:
            search(measure, SMALL_AXES, trials=8, storage=url.format(path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        for one in held:
            if isinstance(one, sqlite3.Connection):
                one.close()
    assert str(caught.value).startswith(f"the storage {url.format(path)} of the study failed: ")
    assert str(caught.value).endswith("then repeat the command to go on with the trials that it has")
    assert str(caught.value).isprintable()
