"""Figures of every rank, carried exactly within a sum over ranks.

Each rank writes its numbers into a row of its own and zeros into the others, so that the sum of all tables is
the table of all ranks. A float64 is carried in float32 as three parts, which hold its 53 bits exactly. So one
reduction carries gradients and figures, every rank reads the same figures bit for bit, and counts above 2^24
stay whole numbers.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from autobatch.distributed.engine import OutOfMemory
from autobatch.step.loss_share import StepTotals

_PARTS = {torch.float32: 3, torch.float64: 1}
_CODES = {torch.float32: "f", torch.float64: "d"}


class Figures(NamedTuple):
    """The numbers that a rank sends with a batch."""

    failed: float
    """1 if memory ran out."""
    signal: float
    """Number of a signal that asks to stop, or 0."""
    has_count: float
    """1 if the loss is a `Loss`."""
    divisor: float
    """D; 0 if no micro-batch ran."""
    loss: float | Tensor
    items: float | Tensor
    """Σ of the counts."""
    has_first_norm: float
    first_norm: float | Tensor
    first_count: float | Tensor


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
    if table.is_cpu:
        table.copy_(torch.frombuffer(_cells(table, row, rank), dtype=table.dtype))
        return
    each = [torch.as_tensor(one, dtype=torch.float64, device=table.device).detach() for one in row]
    values = torch.stack(each)
    table.zero_()
    own = table.view(-1, parts, len(row))[rank]
    for part in range(parts):
        own[part] = values
        if part + 1 < parts:
            # Nothing is left of an infinity or a NaN.
            values = (values - own[part].double()).nan_to_num(0.0, 0.0, 0.0)


def _cells(table: Tensor, row: Sequence[float | Tensor], rank: int) -> array[float]:
    """Return what `write_row` writes into a table on the host, where small tensors cost more than numbers."""
    code = _CODES[table.dtype]
    cells: array[float] = array(code, bytes(table.nbytes))
    at, values = rank * _PARTS[table.dtype] * len(row), [float(one) for one in row]
    for _ in range(_PARTS[table.dtype]):
        rounded: array[float] = array(code, values)
        cells[at : at + len(row)] = rounded
        at += len(row)
        # Nothing is left of an infinity or a NaN, which alone differ from themselves by more than 0.
        values = [one - part if part - part == 0 else 0.0 for one, part in zip(values, rounded, strict=True)]
        if not any(values):
            break
    return cells


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


def figures_of(outcome: StepTotals | OutOfMemory, signal: int) -> Figures:
    """Return the numbers of this rank, with the number of a signal that it got; 0 for none."""
    if isinstance(outcome, OutOfMemory):
        return Figures(1, signal, 0, 0, 0, 0, 0, 0, 0)
    return Figures(
        failed=0,
        signal=signal,
        has_count=outcome.count is not None,
        divisor=outcome.divisor if outcome.sizes else 0,
        loss=outcome.loss,
        items=0.0 if outcome.count is None else outcome.count,
        has_first_norm=outcome.first_norm is not None,
        first_norm=0.0 if outcome.first_norm is None else outcome.first_norm,
        first_count=outcome.first_count,
    )


def sum_totals(totals: StepTotals, rows: list[Figures]) -> None:
    """Replace the sums of one rank by those of all; the first micro-batch is that of rank 0."""
    first = rows[0]
    totals.loss = sum(row.loss for row in rows)
    totals.count = sum(row.items for row in rows) if any(row.has_count for row in rows) else None
    totals.divisor = max(row.divisor for row in rows)
    totals.first_norm = first.first_norm if first.has_first_norm else None
    totals.first_count = first.first_count
