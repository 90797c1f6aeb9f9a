"""The random generators of Python, NumPy and torch: capture, restore and seed them."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor


class RandomState(NamedTuple):
    """The states of all generators that training draws from."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...] | None
    """None if NumPy is not imported."""
    torch: Tensor
    cuda: list[Tensor]
    """One state per GPU; empty if CUDA is not in use."""


def capture_random_state() -> RandomState:
    """Read the states of all generators."""
    numpy = sys.modules.get("numpy")
    return RandomState(
        python=random.getstate(),
        numpy=None if numpy is None else numpy.random.get_state(),
        torch=torch.get_rng_state(),
        cuda=torch.cuda.get_rng_state_all() if _cuda_in_use() else [],
    )


def restore_random_state(state: RandomState) -> None:
    """Set all generators back to a captured state."""
    random.setstate(state.python)
    if state.numpy is not None:
        sys.modules["numpy"].random.set_state(state.numpy)
    torch.set_rng_state(state.torch)
    if state.cuda:
        torch.cuda.set_rng_state_all(state.cuda)


def seed_everything(seed: int) -> None:
    """Seed all generators."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore all generators at the end of the block."""
    state = capture_random_state()
    try:
        yield
    finally:
        restore_random_state(state)


def _cuda_in_use() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def seed_generators(seed: int, batch_index: int, place: int, sample: int) -> None:
    """Seed the CPU generators from a hash of four numbers, so that close numbers give unrelated draws.

    Args:
        seed: of the run.
        batch_index: number of the batch in the run.
        place: of the sample in its batch.
        sample: index of the sample in the data.
    """
    digest = hashlib.blake2b(repr((seed, batch_index, place, sample)).encode(), digest_size=24).digest()
    random.seed(int.from_bytes(digest[:8], "little"))
    # torch.manual_seed would seed the GPUs too.
    torch.default_generator.manual_seed(int.from_bytes(digest[8:16], "little") >> 1)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed([int.from_bytes(digest[at : at + 4], "little") for at in (16, 20)])
