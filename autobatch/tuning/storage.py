"""Where studies are kept: a journal file, a database, a server that speaks for one, or memory."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from optuna.storages import BaseStorage, GrpcStorageProxy, JournalStorage
from optuna.storages.journal import JournalFileBackend

from autobatch.core.errors import InputError

GRPC_PORT = 13000
"""Optuna's own default."""


ANSWER_SECONDS = 10
"""How long to wait for a server to answer."""


PORTS = {"postgresql": 5432, "mysql": 3306, "mariadb": 3306, "mssql": 1433, "oracle": 1521}
"""Where the databases listen by default."""


def open_storage(where: str | None) -> BaseStorage | str | None:
    """What Optuna opens a study in.

    Args:
        where: a database URL, ``grpc://host:port``, or the path of a journal file; ``None``: in memory.

    Raises:
        InputError: grpcio is missing, or the server does not answer.
        Exception: whatever opening it raises.
    """
    if where is None:
        return None
    if where.startswith("grpc://"):
        return _open_grpc(where)
    if "://" in where:
        _knock(where)
        return where
    # The lock is a link to the path as it is given: a relative one would lead nowhere from another folder.
    path = Path(where).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    return JournalStorage(JournalFileBackend(str(path)))


def describe_storage(where: str | None) -> str:
    """Where a study is kept, without its password."""
    return "memory" if where is None else re.sub(r"(://[^:@/]+):[^@/]+@", r"\1:…@", where)


def reason_of(error: BaseException) -> str:
    """Why a storage does not work, in one line: of a chain, its first cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, ModuleNotFoundError):
        return f"it needs the package {error.name}, which is not installed"
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}".removesuffix(": ")


def _knock(where: str) -> None:
    """See that the host of a database answers: a driver may wait for minutes before it gives up.

    Raises:
        InputError: it does not.
    """
    try:
        parts = urlsplit(where)
        port = parts.port or PORTS.get(parts.scheme.partition("+")[0])
    except ValueError:
        return  # several hosts, say: the driver knows better
    if not parts.hostname or port is None:
        return
    try:
        socket.create_connection((parts.hostname, port), timeout=ANSWER_SECONDS).close()
    except OSError as error:
        raise InputError(
            f"the storage {describe_storage(where)} of the study does not answer: {parts.hostname}, port "
            f"{port}: {error.strerror or error}; is the database running, and the address right?"
        ) from error


def _open_grpc(where: str) -> GrpcStorageProxy:
    parts = urlsplit(where)
    if importlib.util.find_spec("grpc") is None:
        raise InputError(
            f"the storage {where} needs the packages grpcio and protobuf: install them, or give the path of "
            "a journal file"
        )
    proxy = GrpcStorageProxy(host=parts.hostname or "localhost", port=parts.port or GRPC_PORT)
    try:
        proxy.wait_server_ready(timeout=ANSWER_SECONDS)
    except ConnectionError:
        raise InputError(
            f"the storage {where} gave no answer in {ANSWER_SECONDS} s: start Optuna's gRPC proxy there "
            "(optuna.storages.run_grpc_proxy_server), or give the path of a journal file"
        ) from None
    return proxy


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


START_TICKS = 19
"""Place of the time of start among the fields after the name in ``/proc/PID/stat`` (proc_pid_stat(5))."""


class Worker(NamedTuple):
    """A process; figures that the system does not tell are ``None``."""

    host: str
    boot: str | None
    """Changes when the machine starts anew."""
    namespace: str | None
    """Of process ids: containers on one machine count on their own."""
    pid: int
    started: str | None
    """When the process started: ids are used again."""


def this_worker() -> Worker:
    """This process."""
    boot = namespace = None
    with suppress(OSError):
        boot = BOOT_ID.read_text().strip()
    with suppress(OSError):
        namespace = str(Path("/proc/self/ns/pid").readlink())
    pid = os.getpid()
    return Worker(socket.gethostname(), boot, namespace, pid, _started(pid))


def is_gone(worker: Worker, here: Worker) -> bool:
    """Whether a process is known to have ended; on other machines nothing is known.

    Args:
        worker: the process.
        here: this one.
    """
    if worker.host != here.host:
        return False
    if worker.boot != here.boot:
        return True
    if worker.namespace != here.namespace:
        return False
    try:
        os.kill(worker.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return worker.started != _started(worker.pid)


def _started(pid: int) -> str | None:
    with suppress(OSError, IndexError):
        # The name may hold anything, parentheses and blanks included.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[START_TICKS]
    return None
