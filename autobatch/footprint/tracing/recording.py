"""The recording of a training step: its trace, with a label per block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from autobatch.device.allocator.trace import Trace
from autobatch.footprint.program import DerivedSize


class Label(NamedTuple):
    """The purpose and the origin of a block."""

    kind: str
    """``parameters``, ``averaged weights``, ``gathered layers``, ``gradients``, ``optimizer state``,
    ``batch``, ``activations`` or ``temporaries``."""
    module: str
    """Name of the module whose forward made the block; empty outside of any."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The trace of an attempt, with labels."""

    trace: Trace
    """Canonical: blocks are numbered in the order of their allocation."""
    labels: tuple[Label, ...]
    """By block number."""
    first_products: tuple[int, ...]
    """Number of events after the results of the first matrix products of forward and backward were taken."""
    products: tuple[int, ...]
    """Number of events after the result of each matrix product was taken."""
    has_convolutions: bool
    has_selections: bool
    """True if a selection by values was recorded as if it kept everything."""
    derived: Mapping[int, DerivedSize] = field(default_factory=dict)
    """Blocks whose sizes follow from other numbers by the rule of a library."""
