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


class Product(NamedTuple):
    """A matrix product, for which cuBLAS takes a workspace on a GPU."""

    at: int
    """Number of events after its result was taken."""
    is_backward: bool
    """True in the thread of the backward pass."""
    is_fused: bool
    """True if cuBLASLt runs it, and adds the bias at once."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The trace of an attempt, with labels."""

    trace: Trace
    """Canonical: blocks are numbered in the order of their allocation."""
    labels: tuple[Label, ...]
    """By block number."""
    products: tuple[Product, ...]
    has_convolutions: bool
    has_selections: bool
    """True if a selection by values was recorded as if it kept everything."""
    derived: Mapping[int, DerivedSize] = field(default_factory=dict)
    """Blocks whose sizes follow from other numbers by the rule of a library."""
