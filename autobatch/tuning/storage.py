"""Where studies are kept: a journal file, a database, a server that speaks for one, or memory."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from urllib.parse import urlsplit

from optuna.storages import BaseStorage, GrpcStorageProxy, JournalStorage
from optuna.storages.journal import JournalFileBackend

from autobatch.errors import InputError

GRPC_PORT = 13000
"""Optuna's own default."""
GRPC_SECONDS = 10
"""How long to wait for the server to answer."""


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
        return where
    Path(where).parent.mkdir(parents=True, exist_ok=True)
    return JournalStorage(JournalFileBackend(where))


def describe_storage(where: str | None) -> str:
    """Where a study is kept, without its password."""
    return "memory" if where is None else re.sub(r"(://[^:@/]+):[^@/]+@", r"\1:…@", where)


def reason_of(error: BaseException) -> str:
    """Why a storage does not work, in one line: of a chain, its first cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}".removesuffix(": ")


def _open_grpc(where: str) -> GrpcStorageProxy:
    parts = urlsplit(where)
    if importlib.util.find_spec("grpc") is None:
        raise InputError(
            f"the storage {where} needs the packages grpcio and protobuf: install them, or give the path of "
            "a journal file"
        )
    proxy = GrpcStorageProxy(host=parts.hostname or "localhost", port=parts.port or GRPC_PORT)
    try:
        proxy.wait_server_ready(timeout=GRPC_SECONDS)
    except ConnectionError:
        raise InputError(
            f"the storage {where} gave no answer in {GRPC_SECONDS} s: start Optuna's gRPC proxy there "
            "(optuna.storages.run_grpc_proxy_server), or give the path of a journal file"
        ) from None
    return proxy
