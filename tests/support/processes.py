"""Child processes of a test."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkProcess


def loader_workers() -> list[ForkProcess]:
    """Return the loader workers that run. The server that forks ranks for other tests was spawned."""
    return [child for child in multiprocessing.active_children() if isinstance(child, ForkProcess)]
