"""Names that torch keeps private, all that the devices use of them, each with what holds where it is gone.

A release of torch may drop or change any of them. Without them nothing is recorded, and the rest works.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

MOST_EVENTS = 300_000
"""Most events of a recording. A longer one would lack its beginning. 25,000 are usual, and a snapshot makes a
Python object of each."""
_GONE = (RuntimeError, TypeError, AttributeError, KeyError, IndexError)


@contextmanager
def recording() -> Iterator[bool]:
    """Record the events of CUDA's allocator within the block, without stacks, which cost more than they do.

    Yields:
        False if torch cannot record, or records for the user already, which another recording would end.
    """
    is_ours = False
    with suppress(*_GONE):
        if not torch._C._cuda_isHistoryEnabled():
            torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=MOST_EVENTS)
            is_ours = True
    try:
        yield is_ours
    finally:
        if is_ours:
            torch.cuda.memory._record_memory_history(enabled=None)


def snapshot(index: int) -> dict[str, Any] | None:
    """Return torch's snapshot of the allocator of a GPU; None if torch makes none."""
    with suppress(*_GONE):
        return dict(torch.cuda.memory._snapshot(index))
    return None


def clear_cublas_workspaces() -> None:
    """Free the workspaces that cuBLAS keeps (until torch 2.14); otherwise they stay, and count as held."""
    with suppress(*_GONE):
        torch._C._cuda_clearCublasWorkspaces()


def is_in_backward() -> bool:
    """Return whether autograd runs a backward pass in this thread; False if torch does not tell."""
    with suppress(*_GONE):
        return torch._C._current_graph_task_id() >= 0
    return False


def is_forked_from_cuda() -> bool:
    """Return whether this process was forked from one that had started CUDA, so that it has no GPU."""
    return bool(getattr(torch._C, "_cuda_isInBadFork", bool)())
