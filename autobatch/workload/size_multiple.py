"""Padded sizes that are multiples of a number, so that a compiled model sees few shapes.

A micro-batch is made by the user's collate function, which alone can pad it. So that function takes the
multiple as an argument, or has it as an attribute, as the collators of transformers do.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autobatch.core.errors import InputError
from autobatch.core.units import parse_multiple
from autobatch.workload.contract import Workload
from autobatch.workload.data import WorstCaseSampler, load_micro_batch, size_of_sample
from autobatch.workload.nested import tensors_of

Sizes = NDArray[np.float64]
ARGUMENT = "pad_to_multiple_of"
"""Name of the argument or attribute; the collators of transformers call it so."""
LEAST = 8
"""The smallest multiple of ``auto``; tensor cores want whole multiples of it in 16 bits."""
MOST_SIZES = 8
"""Different padded sizes that ``auto`` allows: torch.compile gives up after this many (``recompile_limit`` in
torch/_dynamo/config.py)."""
CHECKED = 4
"""Samples of one padded size that must make equal micro-batches."""


def in_multiples(workload: Workload, asked: str | int | None, *, seed: int = 0) -> Workload:
    """Return a workload whose micro-batches are padded to multiples, and whose sizes are rounded up to them.

    Args:
        workload: has a collate function that takes the multiple, and ``size_of``, the length that it pads.
        asked: the multiple; ``auto`` to choose it by the sizes of the samples; None to change nothing.
        seed: of the data's random draws while sizes are read.

    Raises:
        InputError: the workload does not allow it, or its collate function does not pad to the multiple.
    """
    if asked is None:
        return workload
    if workload.size_of is None:
        raise InputError(
            "--size-multiple needs Workload(size_of=…), the length of a sample that collate pads"
        )
    multiple = parse_multiple(asked)
    if multiple is None:
        sizes = WorstCaseSampler(workload, seed=seed).sizes()
        if sizes is None:
            raise InputError(
                "--size-multiple auto needs the sizes of all samples, and reading them takes too long: give "
                "a number"
            )
        multiple = multiple_for(sizes)
    size_of = partial(_rounded, workload.size_of, multiple)
    rounded = replace(workload, collate=_told(workload.collate, multiple), size_of=size_of)
    _check(rounded, seed)
    return rounded


def multiple_for(sizes: Sizes) -> int:
    """Return the smallest power of two, at least `LEAST`, that leaves at most `MOST_SIZES` padded sizes."""
    multiple = LEAST
    while len(np.unique(np.ceil(sizes / multiple))) > MOST_SIZES:
        multiple *= 2
    return multiple


def multiple_of(workload: Workload) -> int | None:
    """Return the multiple that a workload pads to; None for none."""
    size_of = workload.size_of
    if isinstance(size_of, partial) and size_of.func is _rounded:
        multiple: int = size_of.args[1]
        return multiple
    return None


def multiple_notes(workload: Workload, sizes: Sizes | None) -> list[str]:
    """Return a note on the padded sizes of a workload; empty without a multiple."""
    multiple = multiple_of(workload)
    if multiple is None:
        return []
    several = "" if sizes is None else f": {len(np.unique(sizes))} different sizes up to {sizes.max():g}"
    return [f"micro-batches are padded to multiples of {multiple}{several}"]


def _told(collate: Callable[[list[Any]], Any] | None, multiple: int) -> Callable[[list[Any]], Any]:
    """Return a collate function that pads to a multiple."""
    if collate is not None and hasattr(collate, ARGUMENT):
        told = copy.copy(collate)
        setattr(told, ARGUMENT, multiple)
        return told
    try:
        takes_it = collate is not None and ARGUMENT in inspect.signature(collate).parameters
    except (TypeError, ValueError):
        takes_it = False
    if collate is None or not takes_it:
        raise InputError(
            f"--size-multiple {multiple} needs a collate function with an argument or an attribute "
            f"{ARGUMENT}, because it alone can pad a micro-batch: write collate(samples, {ARGUMENT}=None)"
        )
    return partial(collate, **{ARGUMENT: multiple})


def _rounded(size_of: Callable[[Any], float], multiple: int, sample: Any) -> float:
    """Return the size of a sample rounded up to a multiple."""
    return multiple * math.ceil(size_of_sample(sample, size_of, -1) / multiple)


def _check(workload: Workload, seed: int) -> None:
    """Raise if samples of one padded size make micro-batches of several."""
    found: dict[float, tuple[int, int]] = {}
    costs = WorstCaseSampler(workload, seed=seed).sizes()
    if costs is None:
        return
    order = np.argsort(costs, kind="stable").tolist()
    for index in [*order[:CHECKED], *order[-CHECKED:]]:
        numbers = sum(tensor.numel() for tensor in tensors_of(load_micro_batch(workload, [index])))
        first, others = found.setdefault(costs[index], (index, numbers))
        if numbers != others:
            raise InputError(
                f"Workload(collate=…) got {ARGUMENT}={multiple_of(workload)}, but samples {first} and "
                f"{index} of one padded size, {costs[index]:g}, make micro-batches of {others} and {numbers} "
                "numbers: pad to the multiple, and return the length that is padded from size_of"
            )
