"""Digest of the training data, by which all processes of a run are known to read the same.

Data may differ between processes without a word: the order of a ``set`` or of ``listdir``, or a split that
nothing seeds. A few raw samples are read twice under one seed. If the readings differ, the values are random
by nature, and nothing is claimed of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autobatch.core.errors import InputError
from autobatch.core.records import Record
from autobatch.device.host import cpu_name
from autobatch.workload.data import fetch
from autobatch.workload.rng import preserved_generators, seeded

LOOKED_AT = 5
"""Samples that are read: the first, the last, and some between."""
DEEPEST = 8
"""Depth to which a nested sample is read."""


class DataDigest(Record, frozen=True, kw_only=True):
    """Digest of some samples of the training data."""

    samples: int
    """Number of samples in the data."""
    values: str
    """Digest of their values, which a decoder may round otherwise on another machine."""
    machine: str
    """Processor and version of torch that computed them."""

    def is_same(self, other: DataDigest) -> bool:
        """Return whether both may be of the same data."""
        is_comparable = self.machine == other.machine
        return self.samples == other.samples and (self.values == other.values or not is_comparable)


def digest_data(data: Any) -> DataDigest | None:
    """Read a few samples of map-style data, and leave the generators as they were.

    Returns:
        None if the same seed gives other values each time.
    """
    values = _read(data)
    if values != _read(data):
        return None
    return DataDigest(samples=len(data), values=values, machine=f"{cpu_name()}, torch {torch.__version__}")


def check_same_data(digests: Sequence[DataDigest | None], whose: Sequence[str]) -> None:
    """Check that all processes read the same training data as the first one.

    Args:
        digests: what each of them read; None if nothing tells its data from others.
        whose: names each of them, for example ``rank 1``.

    Raises:
        InputError: one of them reads others; names it.
    """
    first = digests[0]
    for digest, name in zip(digests[1:], whose[1:], strict=True):
        if first is not None and digest is not None and not digest.is_same(first):
            raise InputError(
                f"the training data of {name} are not those of {whose[0]} in number, values or order "
                f"({digest.samples:,} samples, and {first.samples:,}). Usual causes: files that are listed "
                "unsorted (sort them), the order of a set (sort it, or set PYTHONHASHSEED=0), and a split or "
                "shuffle whose generator nothing seeds (give generator=)"
            )


def digest_of(samples: Any) -> str:
    """Return a digest of samples."""
    digest = hashlib.sha256()
    _add(samples, digest.update)
    return digest.hexdigest()[:16]


def _read(data: Any) -> str:
    """Return the digest of some samples that are read with seeded generators."""
    last = len(data) - 1
    places = sorted({last * part // (LOOKED_AT - 1) for part in range(LOOKED_AT)})
    with seeded(0), preserved_generators(data):
        samples = fetch(data, places)
    while isinstance(data, torch.utils.data.Subset):
        samples.append(np.asarray(data.indices))
        data = data.dataset
    return digest_of(samples)


def _add(value: Any, add: Callable[[bytes], None], depth: int = 0) -> None:
    """Add the content of a sample to a digest."""
    add(type(value).__name__.encode())
    if isinstance(value, np.ndarray) and value.dtype == object:  # its bytes are addresses
        value = value.tolist()
    if isinstance(value, Tensor | np.ndarray):
        add(f"{tuple(value.shape)}{value.dtype}".encode())
    if isinstance(value, Tensor) and value.layout is torch.strided:
        # NumPy has no bfloat16.
        add(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping | list | tuple) and depth < DEEPEST:
        for child in value.items() if isinstance(value, Mapping) else value:
            _add(child, add, depth + 1)
    elif isinstance(value, Set):
        add(repr(sorted(map(repr, value))).encode())
    elif value is None or isinstance(value, str | bytes | int | float):
        add(repr(value).encode())
    elif callable(getattr(value, "tobytes", None)):  # an array or an image
        add(value.tobytes())
    elif hasattr(value, "__dict__") and depth < DEEPEST:
        _add(vars(value), add, depth + 1)
