"""The random generators of Python, NumPy and torch: capture, restore and seed them."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import random
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autobatch.device.oom import lost_context_ignored

_MT19937_BYTES = 4 * (624 + 1)
"""Size of NumPy's Mersenne Twister: 624 words and the place in them (numpy/random/src/mt19937/mt19937.h)."""
_MARK_BYTES = 4 * 8
"""Size of the place and the seven words beside it, which tell whether a generator was used: a draw moves the
place, and each 624 draws replace all words. Copying all of them would take a twentieth of a small step."""
_Memory = ctypes.c_char * _MT19937_BYTES
_Mark = ctypes.c_char * _MARK_BYTES
"""The mark in the memory of a generator; ``raw`` copies it."""
MOST_HELD = 64
"""Attributes of an object that are looked through for generators."""
HELD_DEPTH = 2
"""Objects within objects that are looked through."""


class RandomState(NamedTuple):
    """The states of all generators that training draws from."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...] | None
    """None if NumPy is not imported."""
    torch: Tensor
    cuda: list[Tensor]
    """One state per GPU; empty if CUDA is not in use."""
    numpy_mark: bytes = b""
    """Place and some words of NumPy's generator when its state was read; empty if unknown."""
    python_mark: bytes = b""
    """The same of Python's generator."""


def capture_random_state(last: RandomState | None = None) -> RandomState:
    """Read the states of all generators.

    Args:
        last: an earlier state. Its parts for Python and NumPy are taken over if nothing was drawn since,
            because reading them takes many times as long as reading all others.
    """
    numpy = sys.modules.get("numpy")
    mark = b"" if numpy is None else _mark_of(numpy)
    if last is not None and _is_same(last, mark):
        numpy_state = last.numpy
    else:
        numpy_state = None if numpy is None else numpy.random.get_state()
    memory = _python_state()
    own = b"" if memory is None else memory.raw
    generator: Any = random._inst
    has_normal = generator.gauss_next is not None
    is_same = last is not None and own and own == last.python_mark and not has_normal
    return RandomState(
        python=last.python if last is not None and is_same and last.python[2] is None else random.getstate(),
        numpy=numpy_state,
        torch=torch.default_generator.get_state(),
        cuda=torch.cuda.get_rng_state_all() if _cuda_in_use() else [],
        numpy_mark=mark,
        python_mark=own,
    )


def plain_random_state(state: RandomState | None = None) -> dict[str, Any]:
    """Return states as values that JSON can hold, those of now if none are given; bytes are hexadecimal."""
    state = capture_random_state() if state is None else state
    numpy = state.numpy
    return {
        "python": [state.python[0], list(state.python[1]), state.python[2]],
        "numpy": None if numpy is None else [numpy[0], numpy[1].tolist(), *numpy[2:]],
        "torch": _hex_of(state.torch),
        "cuda": [_hex_of(one) for one in state.cuda],
    }


def random_state_of(plain: Mapping[str, Any]) -> RandomState:
    """Return the states that `plain_random_state` returned.

    Raises:
        ValueError: a state has no such form.
        TypeError: a state has no such form.
    """
    numpy = plain["numpy"]
    if numpy is not None:
        from numpy import array, uint32

        numpy = (numpy[0], array(numpy[1], uint32), *numpy[2:])
    version, words, gauss = plain["python"]
    return RandomState(
        python=(version, tuple(words), gauss),
        numpy=numpy,
        torch=_bytes_of(plain["torch"]),
        cuda=[_bytes_of(one) for one in plain["cuda"]],
    )


def _hex_of(state: Tensor) -> str:
    return bytes(state.tolist()).hex()


def _bytes_of(text: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8, device="cpu")


@functools.cache
def _python_state() -> ctypes.Array[ctypes.c_char] | None:
    """Find the mark of Python's global generator; None if its layout is not the known one.

    The layout is that of ``RandomObject`` in CPython's Modules/_randommodule.c: the head of an object, the
    place, and 624 words. It is compared with the state that Python reports, once per process.
    """
    generator: Any = random._inst
    head = object.__basicsize__
    if sys.implementation.name != "cpython" or type(generator) is not random.Random:
        return None
    if random.Random.__mro__[1].__basicsize__ < head + _MT19937_BYTES:
        return None
    address = id(generator) + head
    words = struct.unpack(f"={_MT19937_BYTES // 4}I", _Memory.from_address(address).raw)
    is_known = (*words[1:], words[0]) == generator.getstate()[1]
    return _Mark.from_address(address) if is_known else None


def _mark_of(numpy: ModuleType) -> bytes:
    """Copy the mark of NumPy's global generator, empty if it is not the default one."""
    # The function came with NumPy 1.24.
    find: Callable[[], Any] | None = getattr(numpy.random, "get_bit_generator", None)
    memory = None if find is None else _numpy_state(find())
    return b"" if memory is None else memory.raw


@functools.lru_cache(maxsize=1)
def _numpy_state(generator: Any) -> ctypes.Array[ctypes.c_char] | None:
    """Find the mark in a generator's state, which takes longer than reading it."""
    if type(generator).__name__ != "MT19937":
        return None
    # Here the place comes after the words.
    return _Mark.from_address(generator.ctypes.state_address + _MT19937_BYTES - _MARK_BYTES)


def _is_same(last: RandomState, mark: bytes) -> bool:
    """Return whether nothing was drawn from NumPy's generator since, given its mark now."""
    if last.numpy is None or not mark or mark != last.numpy_mark:
        return False
    _, _, _, has_normal, _ = last.numpy
    # A pair of normal numbers is drawn at once: the second one may be gone without a change of the memory.
    return not has_normal


def restore_random_state(state: RandomState) -> None:
    """Set all generators back to a captured state."""
    random.setstate(state.python)
    if state.numpy is not None:
        sys.modules["numpy"].random.set_state(state.numpy)
    torch.set_rng_state(state.torch)
    if state.cuda:
        with lost_context_ignored():
            torch.cuda.set_rng_state_all(state.cuda)


def seed_everything(seed: int) -> None:
    """Seed all generators."""
    random.seed(seed)
    seed_torch(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def seed_torch(seed: int) -> None:
    """Seed torch's generators of the CPU and of all GPUs.

    In a process that has not used CUDA, `torch.manual_seed` formats and keeps three stack traces in each call
    (``_lazy_call`` in torch/cuda/__init__.py, and its like for XPU and MTIA), which takes a hundred times as
    long as the seeding.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def seed_rank(seed: int, rank: int, batches_seen: int = 0) -> None:
    """Seed all generators of a rank of several, so that each draws other numbers; rank 0 as one process."""
    if rank == 0 and batches_seen == 0:
        seed_everything(seed)
        return
    digest = hashlib.blake2b(repr((seed, rank, batches_seen)).encode(), digest_size=8).digest()
    seed_everything(int.from_bytes(digest, "little") >> 1)


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore all generators at the end of the block."""
    state = capture_random_state()
    try:
        yield
    finally:
        restore_random_state(state)


def _cuda_in_use() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_available()  # type: ignore[no-untyped-call]


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


@contextmanager
def preserved_generators(owner: object) -> Iterator[list[Any]]:
    """Find the generators that an object and the objects within it hold, and restore them afterwards.

    Yields:
        Generators of Python, NumPy and torch.
    """
    found = list(_generators_within(owner))
    states = [_state_of(one) for one in found]
    try:
        yield found
    finally:
        for one, state in zip(found, states, strict=True):
            _set_state(one, state)


def seed_generator(generator: Any, seed: int) -> None:
    """Seed a generator of Python, NumPy or torch."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    else:
        generator.bit_generator.state = type(generator.bit_generator)(seed).state


def _generators_within(owner: Any, depth: int = 0) -> Iterator[Any]:
    numpy = sys.modules.get("numpy")
    kinds = (torch.Generator, random.Random, *([] if numpy is None else [numpy.random.Generator]))
    held = owner if isinstance(owner, list | tuple) and depth else getattr(owner, "__dict__", {}).values()
    for one in islice(held, MOST_HELD):
        if isinstance(one, kinds):
            yield one
        elif depth < HELD_DEPTH and not isinstance(one, Tensor | type):
            yield from _generators_within(one, depth + 1)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return generator.getstate() if isinstance(generator, random.Random) else generator.bit_generator.state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.bit_generator.state = state
