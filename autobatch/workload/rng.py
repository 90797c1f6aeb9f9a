"""The random generators of Python, NumPy and torch: capture, restore and seed them."""

from __future__ import annotations

import ctypes
import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

MT19937_BYTES = 4 * (624 + 1)
"""Size of NumPy's Mersenne Twister: 624 words and the place in them (numpy/random/src/mt19937/mt19937.h)."""
MOST_HELD = 64
"""Attributes of an object that are looked through for generators."""
HELD_DEPTH = 2
"""Objects within objects that are looked through."""


class RandomState(NamedTuple):
    """The states of all generators that training draws from."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    torch: Tensor
    cuda: list[Tensor]
    """One state per GPU; empty if CUDA is not in use."""
    numpy_memory: bytes = b""
    """The memory of NumPy's generator when its state was read; empty if unknown."""

    def plain(self) -> dict[str, Any]:
        """Return the states by their names, as tensors and plain values, as a checkpoint keeps them."""
        kind, words, *place = self.numpy
        numpy = (kind, words.tolist(), *place)
        return {"python": self.python, "numpy": numpy, "torch": self.torch, "cuda": self.cuda}


def capture_random_state(last: RandomState | None = None, *, gpus: bool = True) -> RandomState:
    """Read the states of all generators, or of all but those of the GPUs.

    Args:
        last: an earlier state. Its part for NumPy is taken over if nothing was drawn since, because reading
            it takes many times as long as all others.
        gpus: False to leave out the generators of the GPUs.
    """
    generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    memory = b""
    if isinstance(generator, np.random.MT19937):
        memory = ctypes.string_at(generator.ctypes.state_address, MT19937_BYTES)
    # Normal numbers are drawn in pairs: the second one may be gone without a change of the memory.
    is_same = last is not None and memory and memory == last.numpy_memory and not last.numpy[3]
    has_cuda = gpus and torch.cuda.is_initialized() and torch.cuda.is_available()  # type: ignore[no-untyped-call]
    return RandomState(
        python=random.getstate(),
        numpy=last.numpy if last is not None and is_same else np.random.get_state(),  # type: ignore[arg-type]
        torch=torch.default_generator.get_state(),
        cuda=torch.cuda.get_rng_state_all() if has_cuda else [],
        numpy_memory=memory,
    )


def restore_random_state(state: RandomState) -> None:
    """Set all generators back to a captured state."""
    kind, words, *place = state.numpy
    random.setstate(state.python)
    np.random.set_state((kind, np.asarray(words, np.uint32), *place))
    torch.set_rng_state(state.torch)
    if state.cuda:
        with suppress(torch.AcceleratorError):  # a lost context has raised its error already
            torch.cuda.set_rng_state_all(state.cuda)


def seed_everything(seed: int, *, gpus: bool = True) -> None:
    """Seed all generators, or all but those of the GPUs.

    In a process that has not used CUDA, `torch.manual_seed` formats and keeps three stack traces in each call
    (``_lazy_call`` in torch/cuda/__init__.py, and its like for XPU and MTIA), which takes a hundred times as
    long as the seeding.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if gpus and torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def mix_seed(*numbers: int) -> int:
    """Return a seed of 64 bits from a hash of numbers, so that close numbers give unrelated draws."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@contextmanager
def preserved_random_state(*, gpus: bool = True) -> Iterator[None]:
    """Restore all generators, or all but those of the GPUs, at the end of the block."""
    state = capture_random_state(gpus=gpus)
    try:
        yield
    finally:
        restore_random_state(state)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all generators within the block, and restore them at its end."""
    with preserved_random_state():
        seed_everything(seed)
        yield


def seed_cpu(*numbers: int) -> None:
    """Seed the generators of the CPU from a hash of numbers."""
    seed_everything(mix_seed(*numbers), gpus=False)


@contextmanager
def preserved_generators(*owners: object, seed: int | None = None) -> Iterator[None]:
    """Restore at the end of the block torch's generators that objects and the objects within them hold.

    Args:
        owners: the objects.
        seed: to seed them with within the block; None to leave them as they are.
    """
    held = [(generator, generator.get_state()) for owner in owners for generator in _generators_within(owner)]
    try:
        if seed is not None:
            for generator, _ in held:
                generator.manual_seed(seed)
        yield
    finally:
        for generator, state in held:
            generator.set_state(state)


def _generators_within(owner: Any, depth: int = 0) -> Iterator[torch.Generator]:
    """Yield the generators within an object."""
    for value in islice(getattr(owner, "__dict__", {}).values(), MOST_HELD):
        if isinstance(value, torch.Generator):
            yield value
        elif depth < HELD_DEPTH and not isinstance(value, Tensor | type):
            yield from _generators_within(value, depth + 1)
