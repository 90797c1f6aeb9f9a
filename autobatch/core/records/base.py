"""The base of all records, and the choices that several of them share."""

from __future__ import annotations

from typing import Literal

import msgspec

SCHEMA = 3
"""Version of the JSON that the command line prints."""
Precision = Literal["fp32", "bf16", "fp16"]
GradientDtype = Literal["fp32", "weights"]
"""Type in which gradients are summed: float32 at least, or that of the weights."""
Parallel = Literal["replicate", "shard"]
ShardSync = Literal["each", "once"]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all records: immutable, keyword-only, serialized under the field names."""
