"""Storages of studies: memory, a journal file, a database or its gRPC proxy, shared by several processes."""

from __future__ import annotations

import datetime
import importlib.util
import re
import socket
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from optuna import Study, logging
from optuna.exceptions import ExperimentalWarning, UpdateFinishedTrialError
from optuna.storages import BaseStorage, GrpcStorageProxy, JournalStorage, get_storage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from autobatch.core.errors import AutobatchError, InputError
from autobatch.tuning.worker import Worker, is_gone

GRPC_PORT = 13000
"""Optuna's default port."""
TIMEOUT_S = 10
"""Time to wait for a server to answer."""
PORTS = {"postgresql": 5432, "mysql": 3306, "mariadb": 3306, "mssql": 1433, "oracle": 1521}
"""Default ports of databases."""


def open_storage(location: str | None) -> BaseStorage | str | None:
    """Open a storage in a form that Optuna takes.

    Args:
        location: a database URL, ``grpc://host:port``, or the path of a journal file; None for memory.

    Raises:
        InputError: grpcio is missing, or the server does not answer.
        Exception: whatever opening the storage raises.
    """
    if location is None:
        return None
    if location.startswith("grpc://"):
        return _open_grpc(location)
    if "://" in location:
        _check_server_answers(location)
        return location
    # The lock is a symbolic link to the path as given: a relative one would not resolve from another folder.
    path = Path(location).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    return JournalStorage(JournalFileBackend(str(path)))


def check_storage(location: str) -> None:
    """Check that a storage can be opened, before minutes are spent on results for it.

    Args:
        location: see `open_storage`.

    Raises:
        InputError: the storage cannot be opened, or does not answer.
    """
    logging.set_verbosity(logging.ERROR)
    with storage_errors(location, "opened"):
        opened = get_storage(open_storage(location))
        opened.get_all_studies()
        opened.remove_session()


def describe_storage(location: str | None) -> str:
    """Return the location of a storage without its password."""
    return "memory" if location is None else re.sub(r"(://[^:@/]+):[^@/]+@", r"\1:…@", location)


@contextmanager
def storage_errors(location: str | None, action: str) -> Iterator[None]:
    """Turn any error of a storage within the block into an error of one line.

    Args:
        location: see `open_storage`.
        action: the failed action: ``opened``, ``read``, ``used`` or ``written``.

    Raises:
        InputError: the storage raised an error.
    """
    try:
        with warnings.catch_warnings():
            # Some of the interfaces in use are experimental in Optuna.
            warnings.simplefilter("ignore", ExperimentalWarning)
            yield
    except AutobatchError:
        raise
    except Exception as error:
        reason = reason_of(error)
        advice = "Give a database URL, grpc://host:port or the path of a journal file"
        if "locked" in reason:
            advice = "Another process holds it: wait until that ends, or give another storage"
        raise InputError(
            f"the storage {describe_storage(location)} of the study cannot be {action}: {reason}. {advice}"
        ) from error


def reason_of(error: BaseException) -> str:
    """Return the first cause of a storage error in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, ModuleNotFoundError):
        return f"it needs the package {error.name}, which is not installed"
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}".removesuffix(": ")


def _check_server_answers(location: str) -> None:
    """Check that the host of a database answers, because a driver may wait for minutes.

    Raises:
        InputError: the host does not answer.
    """
    try:
        parts = urlsplit(location)
        port = parts.port or PORTS.get(parts.scheme.partition("+")[0])
    except ValueError:
        return  # for example several hosts: leave the check to the driver
    if not parts.hostname or port is None:
        return
    try:
        socket.create_connection((parts.hostname, port), timeout=TIMEOUT_S).close()
    except OSError as error:
        raise InputError(
            f"the storage {describe_storage(location)} of the study does not answer: {parts.hostname}, port "
            f"{port}: {error.strerror or error}. Check that the database is running and the address is right"
        ) from error


def _open_grpc(location: str) -> GrpcStorageProxy:
    parts = urlsplit(location)
    if importlib.util.find_spec("grpc") is None:
        raise InputError(
            f"the storage {describe_storage(location)} needs the packages grpcio and protobuf. "
            "Install them, or give the path of a journal file"
        )
    proxy = GrpcStorageProxy(host=parts.hostname or "localhost", port=parts.port or GRPC_PORT)
    try:
        proxy.wait_server_ready(timeout=TIMEOUT_S)
    except ConnectionError:
        raise InputError(
            f"the storage {describe_storage(location)} did not answer within {TIMEOUT_S} s. "
            "Start Optuna's gRPC proxy there (optuna.storages.run_grpc_proxy_server), "
            "or give the path of a journal file"
        ) from None
    return proxy


MADE_FOR = "made_for"
"""Attribute of a study: plain values by name that its results depend on."""
WORKER = "worker"
"""Attribute of a trial: the process that runs it."""
ORPHAN_S = 60.0
"""A trial that has run this long without an owner lost its process in its first moment."""


def check_purpose(study: Study, made_for: Mapping[str, Any], location: str | None) -> None:
    """Check that a study was made for the same things, and note them in a new one.

    Raises:
        InputError: the study was made for something else.
    """
    known = study.user_attrs.get(MADE_FOR)
    if known is None and not study.get_trials(deepcopy=False):
        study.set_user_attr(MADE_FOR, dict(made_for))
        return
    known = known or {}
    differing = [
        f"{name} is {_shown(made_for, name)} here and {_shown(known, name)} there"
        for name in sorted({*made_for, *known})
        if made_for.get(name) != known.get(name)
    ]
    if differing:
        raise InputError(
            f"the study {study.study_name!r} in {describe_storage(location)} was made for something else: "
            f"{', '.join(differing)}. Choose another --study"
        )


def _shown(values: Mapping[str, Any], name: str) -> str:
    return repr(values[name]) if name in values else "missing"


def close_orphans(study: Study, here: Worker) -> None:
    """Close the running trials of processes that have ended.

    Args:
        study: the study.
        here: this process.
    """
    now = datetime.datetime.now(tz=datetime.UTC)
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        owner = trial.user_attrs.get(WORKER)
        if owner is not None:
            is_orphan = is_gone(Worker(*owner), here)
        else:
            start = (trial.datetime_start or now).astimezone(datetime.UTC)
            is_orphan = (now - start).total_seconds() > ORPHAN_S
        if is_orphan:
            with suppress(UpdateFinishedTrialError):
                study.tell(trial.number, state=TrialState.FAIL)
