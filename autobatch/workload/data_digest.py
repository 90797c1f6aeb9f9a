"""Digest of the training data, by which all processes of a run are known to read the same.

Data may differ between processes without a word: the order of a ``set`` or of ``listdir``, or a split that
nothing seeds. A few raw samples are read under one seed, another one, and the first one again. If the first
and the last reading differ, the values are random by nature, and nothing is claimed of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autobatch.core.errors import InputError
from autobatch.core.records import Record
from autobatch.device.host import cpu_name
from autobatch.workload.data import fetch
from autobatch.workload.rng import preserved_generators, preserved_random_state, seed_everything

LOOKED_AT = 5
"""Samples that are read: the first, the last, and some between."""
DEEPEST = 8
"""Depth to which a nested sample is read."""
CAUSES = (
    "Usual causes: files that are listed unsorted (sort them), the order of a set (sort it, or set "
    "PYTHONHASHSEED=0), and a split or shuffle whose generator nothing seeds (give generator=)"
)


class DataDigest(Record, frozen=True, kw_only=True):
    """Digests of some samples of the training data."""

    samples: int
    """Number of samples in the data."""
    exact: str
    """Digest of whole numbers, texts, shapes and indices, which are the same on every machine."""
    computed: str
    """Digest of floating-point and 8-bit values, which a decoder may round otherwise on another machine."""
    machine: str
    """Processor and version of torch that computed them."""
    is_fixed: bool
    """True if the values do not depend on the random generators."""

    def is_same(self, other: DataDigest) -> bool:
        """Return whether both may be of the same data."""
        if (self.samples, self.exact) != (other.samples, other.exact):
            return False
        return self.machine != other.machine or self.computed == other.computed


def digest_data(data: Any) -> DataDigest | None:
    """Read a few samples of map-style data, and leave the generators as they were.

    Returns:
        None if the same seed gives other values each time.
    """
    first, other, again = (_read(data, seed) for seed in (0, 1, 0))
    if first != again:
        return None
    exact, computed = first
    return DataDigest(
        samples=len(data),
        exact=exact,
        computed=computed,
        machine=f"{cpu_name()}, torch {torch.__version__}",
        is_fixed=first == other,
    )


def check_same_data(found: Sequence[DataDigest | None], whose: Sequence[str]) -> None:
    """Check that all processes read the same training data as the first one.

    Args:
        found: what each of them read; None if nothing tells its data from others.
        whose: names each of them, for example ``rank 1``.

    Raises:
        InputError: one of them reads others; names it.
    """
    for digest, name in zip(found[1:], whose[1:], strict=True):
        if digest is None or found[0] is None or digest.is_same(found[0]):
            continue
        counts = (
            f": {digest.samples:,} samples, and {found[0].samples:,}"
            if digest.samples != found[0].samples
            else f", in values or in order ({digest.samples:,} samples)"
        )
        raise InputError(f"the training data of {name} are not those of {whose[0]}{counts}. {CAUSES}")


def _read(data: Any, seed: int) -> tuple[str, str]:
    """Return the digests of some samples that are read with seeded generators."""
    exact, computed = hashlib.sha256(), hashlib.sha256()
    last = len(data) - 1
    places = sorted({last * part // (LOOKED_AT - 1) for part in range(LOOKED_AT)})
    with preserved_random_state(), preserved_generators(data):
        seed_everything(seed)
        samples = fetch(data, places)
    for is_computed, content in _parts([*_indices(data), *samples]):
        (computed if is_computed else exact).update(content)
    return exact.hexdigest()[:16], computed.hexdigest()[:16]


def _indices(data: Any) -> Iterator[Any]:
    """Yield the indices of a subset, and those of the subset that it is of."""
    while isinstance(data, torch.utils.data.Subset):
        yield np.asarray(data.indices)
        data = data.dataset


def _parts(value: Any, depth: int = 0) -> Iterator[tuple[bool, bytes]]:
    """Yield the content of a sample: whether a machine may round it otherwise, and its bytes."""
    yield False, type(value).__name__.encode()
    if isinstance(value, Tensor):
        yield from _tensor_parts(value)
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield False, f"{value.shape}{value.dtype}".encode()
        yield _is_computed(value.dtype.kind, value.itemsize), np.ascontiguousarray(value).tobytes()
    elif isinstance(value, bytes | str):
        yield False, value if isinstance(value, bytes) else value.encode(errors="surrogatepass")
    elif value is None or isinstance(value, bool | int | float | complex | np.generic):
        yield isinstance(value, float | complex | np.inexact), repr(value).encode()
    elif depth == DEEPEST:
        return
    elif isinstance(value, Mapping):
        for name in value:
            yield from _parts([name, value[name]], depth + 1)
    elif isinstance(value, Set):
        yield False, repr(sorted(map(repr, value))).encode()
    elif isinstance(value, list | tuple | np.ndarray):
        for one in value:
            yield from _parts(one, depth + 1)
    elif callable(getattr(value, "tobytes", None)):  # an image
        yield True, value.tobytes()
    elif hasattr(value, "__dict__"):
        yield from _parts(vars(value), depth + 1)


def _tensor_parts(value: Tensor) -> Iterator[tuple[bool, bytes]]:
    yield False, f"{tuple(value.shape)}{value.dtype}".encode()
    if value.layout is not torch.strided or value.is_meta:
        return
    plain = value.detach().cpu().contiguous().reshape(-1)
    kind = "f" if value.dtype.is_floating_point or value.dtype.is_complex else "i"
    yield _is_computed(kind, value.element_size()), plain.view(torch.uint8).numpy().tobytes()


def _is_computed(kind: str, item_bytes: int) -> bool:
    """Return whether values may be decoded or computed: floating-point numbers, and the bytes of an image."""
    return kind in "fc" or (kind in "iu" and item_bytes == 1)
