"""TODO."""

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
    """The generators that training draws from."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...] | None
    """``None`` where NumPy was not imported."""
    torch: Tensor
    cuda: list[Tensor]
    """One state a card; empty where CUDA was not used."""


def capture_random_state() -> RandomState:
    """Read all generators."""
    numpy = sys.modules.get("numpy")
    return RandomState(
        python=random.getstate(),
        numpy=None if numpy is None else numpy.random.get_state(),
        torch=torch.get_rng_state(),
        cuda=torch.cuda.get_rng_state_all() if _cuda_in_use() else [],
    )


def restore_random_state(state: RandomState) -> None:
    """Put all generators back to where they were."""
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
    """Inside, draw as you like; afterwards all generators are where they were."""
    state = capture_random_state()
    try:
        yield
    finally:
        restore_random_state(state)


def _cuda_in_use() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def seed_generators(seed: int, window: int, place: int, sample: int) -> None:
    """Seed the generators of the CPU from four numbers; those of neighbours have nothing in common."""
    digest = hashlib.blake2b(repr((seed, window, place, sample)).encode(), digest_size=24).digest()
    random.seed(int.from_bytes(digest[:8], "little"))
    # Not torch.manual_seed, which seeds the cards as well.
    torch.default_generator.manual_seed(int.from_bytes(digest[8:16], "little") >> 1)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed([int.from_bytes(digest[at : at + 4], "little") for at in (16, 20)])
