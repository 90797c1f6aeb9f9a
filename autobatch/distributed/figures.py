"""Figures of every rank, carried exactly within a sum over ranks.

Each rank writes its numbers into a row of its own and zeros into the others, so that the sum of all tables is
the table of all ranks. A float64 is carried in float32 as three parts, which hold its 53 bits exactly. So one
reduction carries gradients and figures, every rank reads the same figures bit for bit, and counts above 2^24
stay whole numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_PARTS = {torch.float32: 3, torch.float64: 1}


def table_size(world: int, columns: int, dtype: torch.dtype) -> int:
    """Return the elements that a table takes."""
    return world * columns * _PARTS[dtype]


def write_row(table: Tensor, row: Sequence[float | Tensor], rank: int) -> None:
    """Write the numbers of a rank into a table, and zeros into the rows of the others.

    Args:
        table: a 1-d tensor of `table_size` elements, float32 or float64.
        row: numbers, or 0-d tensors on the device of the table; the host does not wait for them.
        rank: the rank.
    """
    parts = _PARTS[table.dtype]
    values = torch.stack(
        [torch.as_tensor(one, dtype=torch.float64, device=table.device).detach() for one in row]
    )
    table.zero_()
    own = table.view(-1, parts, len(row))[rank]
    for part in range(parts):
        own[part] = values
        if part + 1 < parts:
            # Nothing is left of an infinity or a NaN.
            values = (values - own[part].double()).nan_to_num(0.0, 0.0, 0.0)


def read_rows(table: Sequence[float], columns: int, dtype: torch.dtype) -> list[list[float]]:
    """Read the numbers of every rank from a table that was summed over the ranks.

    Args:
        table: its elements, on the host.
        columns: numbers of a row.
        dtype: of the table.
    """
    parts = _PARTS[dtype]
    rows = []
    for start in range(0, len(table), columns * parts):
        row = table[start : start + columns * parts]
        rows.append([sum(row[column::columns]) for column in range(columns)])
    return rows
