"""Storages of studies, and the processes that share one."""

from __future__ import annotations

import contextlib
import os
import socket
import sqlite3
from importlib.util import find_spec
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from autobatch.core.errors import InputError
from autobatch.tuning import storage as storages
from autobatch.tuning.configuration import all_configurations
from autobatch.tuning.storage import check_storage
from autobatch.tuning.worker import this_worker
from tests.support.studies import AXES, SMALL_AXES, open_journal, search


@pytest.mark.parametrize(
    ("storage", "said"),
    [
        ("FOLDER", "IsADirectoryError"),
        ("FOLDER/file/s.log", "NotADirectoryError|FileExistsError"),
        ("nothing://there", "dialect|Could not parse|plugin"),
        ("postgresql://user:secret@127.0.0.1:9/x", "does not answer: 127.0.0.1, port 9: Connection refused"),
        ("mysql+nodriver://user:secret@/x", "nodriver"),
        ("mysql+pymysql:///x", "needs the package pymysql, which is not installed"),
        pytest.param(
            "grpc://127.0.0.1:9",
            "grpcio",
            marks=pytest.mark.skipif(find_spec("grpc") is not None, reason="grpcio is installed"),
        ),
    ],
)
def test_a_storage_that_cannot_be_opened_gives_an_error_of_one_line(
    tmp_path: Path, storage: str, said: str
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=said) as found:
        search(storage=storage.replace("FOLDER", str(tmp_path)))
    assert "\n" not in str(found.value)
    assert "secret" not in str(found.value)


def test_a_silent_host_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver would wait for minutes, because Linux drops connections when a listening queue is full."""
    monkeypatch.setattr(storages, "TIMEOUT_S", 0.2)
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        port = listening.getsockname()[1]
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        with pytest.raises(InputError, match=f"does not answer: 127.0.0.1, port {port}: timed out"):
            check_storage(f"postgresql://user:secret@127.0.0.1:{port}/x")


def test_the_lock_of_a_journal_is_an_absolute_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Optuna reads a lock's age through the link, and waits forever if it cannot be resolved."""
    links = []
    real = os.symlink
    monkeypatch.setattr(os, "symlink", lambda target, path: links.append(target) or real(target, path))
    monkeypatch.chdir(tmp_path)
    search(axes=SMALL_AXES, trials=1, storage="deep/s.log")
    assert links
    assert {Path(target) for target in links} == {tmp_path / "deep" / "s.log"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_database_works_and_a_locked_one_gives_an_error_of_one_line(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/s.db"
    assert search(axes=SMALL_AXES, trials=4, storage=url).tuning.trials == 4
    lock = sqlite3.connect(tmp_path / "s.db")
    lock.execute("BEGIN EXCLUSIVE")
    try:
        with pytest.raises(
            InputError, match=r"cannot be .*: OperationalError: database is locked. Another process"
        ):
            search(axes=SMALL_AXES, trials=5, storage=url)
    finally:
        lock.rollback()
        lock.close()


def test_a_study_made_for_something_else_is_rejected_with_the_differences(tmp_path: Path) -> None:
    storage = str(tmp_path / "s.log")
    search(trials=1, storage=storage, made_for={"model": "a", "target_batch": 64})
    with pytest.raises(InputError) as found:
        search(trials=1, storage=storage, made_for={"model": "b", "target_batch": 64})
    assert (
        f"the study 'study' in {storage} was made for something else: model is 'b' here and 'a' there"
        in str(found.value)
    )
    with pytest.raises(InputError, match=r"checkpointing is missing here and .* Choose another --study"):
        search(axes=SMALL_AXES, trials=1, storage=storage, made_for={"model": "a", "target_batch": 64})
    assert "\n" not in str(found.value)


def test_a_study_that_another_program_made_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "s.log"
    backend = optuna.storages.journal.JournalFileBackend(str(path))
    study = optuna.create_study(study_name="study", storage=optuna.storages.JournalStorage(backend))
    study.tell(study.ask(), 1.0)
    with pytest.raises(InputError, match="made for something else"):
        search(trials=1, storage=str(path))


def test_trials_of_ended_processes_are_closed_and_others_are_not(tmp_path: Path) -> None:
    storage = str(tmp_path / "s.log")
    search(trials=1, storage=storage)
    study = open_journal(tmp_path / "s.log")
    me = this_worker()
    owners = {
        "ended": me._replace(pid=2**22 + 1),
        "another with its number": me._replace(started="1"),
        "before the machine started": me._replace(boot="another"),
        "of a container": me._replace(namespace="another", pid=2**22 + 1),
        "of another machine": me._replace(host="another", boot="another"),
        "alive": me,
    }
    numbers = {}
    for (who, owner), values in zip(owners.items(), list(all_configurations(AXES))[1:], strict=False):
        study.enqueue_trial(dict(values))
        trial = study.ask()
        trial.set_user_attr("worker", list(owner))
        for axis in AXES:
            trial.suggest_categorical(axis.name, list(axis.choices))
        numbers[trial.number] = who
    found = search(trials=8, storage=storage).tuning
    after = {
        numbers[t.number]: t.state for t in open_journal(tmp_path / "s.log").trials if t.number in numbers
    }
    closed = {who for who, state in after.items() if state is TrialState.FAIL}
    assert closed == {"ended", "another with its number", "before the machine started"}
    # Three are running in other live processes.
    assert found.trials == 8 - 3
