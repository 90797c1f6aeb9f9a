"""The workloads of the table: their names, and functions that build them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from autobatch import Workload
from benchmarks.clients import of_others, of_torch, of_transformers


class Client(NamedTuple):
    """A workload of another library."""

    name: str
    build: Callable[[], Workload]
    """Builds it; raises ImportError if a package is missing."""


def clients() -> list[Client]:
    """Return the workloads in the order of the table."""
    of_others.load_torchvision()
    parts = (of_transformers.WORKLOADS, of_torch.WORKLOADS, of_others.WORKLOADS)
    return [Client(name, build) for part in parts for name, build in part.items()]
