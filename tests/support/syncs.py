"""A block in which torch raises if the host waits for a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def forbidden_syncs() -> Iterator[None]:
    """Raise within the block if torch waits for a GPU, and allow it again afterwards in any case.

    The first switch warns that the mode is a prototype, after it was set (torch/csrc/cuda/Module.cpp). As an
    error, that warning would leave the mode on for the rest of the process.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
