"""Figures of the ranks within a sum: what is read is what was written, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autobatch.distributed.engine import OutOfMemory
from autobatch.distributed.figures import figures_of, read_rows, sum_totals, table_size, write_row
from autobatch.step.loss_share import StepTotals

DTYPES = [torch.float32, torch.float64]
NUMBERS = st.one_of(
    st.integers(-(2**53), 2**53).map(float),
    st.floats(1e-20, 1e30),
    st.sampled_from([0.0, math.inf, -math.inf, 1 / 3, -2.5]),
)


@pytest.mark.parametrize("dtype", DTYPES)
@given(rows=st.lists(st.lists(NUMBERS, min_size=3, max_size=3), min_size=1, max_size=4))
def test_every_rank_reads_the_rows_of_all(dtype: torch.dtype, rows: list[list[float]]) -> None:
    tables = []
    for rank, row in enumerate(rows):
        table = torch.full((table_size(len(rows), 3, dtype),), 7.0, dtype=dtype)
        write_row(table, [row[0], torch.tensor(row[1], dtype=torch.float64), row[2]], rank)
        tables.append(table)
    assert read_rows(sum(tables).tolist(), 3, dtype) == rows  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_stays_a_nan_in_its_place(dtype: torch.dtype) -> None:
    table = torch.empty(table_size(2, 2, dtype), dtype=dtype)
    write_row(table, [math.nan, 5.0], 1)
    (zero, other), (nan, five) = read_rows(table.tolist(), 2, dtype)
    assert (zero, other, five) == (0, 0, 5)
    assert math.isnan(nan)


def test_totals_are_those_of_all_ranks_and_the_first_micro_batch_that_of_rank_0() -> None:
    first = StepTotals(samples=7, loss=1.5, count=3.0, divisor=8.0, sizes=[2, 2], first_count=2.0)
    second = StepTotals(samples=7, loss=0.25, count=4.0, divisor=8.0, sizes=[3], first_count=9.0)
    nothing = StepTotals(samples=7)
    rows = [figures_of(one, signal) for one, signal in ((first, 0), (second, 15), (nothing, 0))]
    assert [row.signal for row in rows] == [0, 15, 0]
    for totals in (first, second, nothing):
        sum_totals(totals, rows)
        assert (totals.loss, totals.count, totals.divisor) == (1.75, 7.0, 8.0)
        assert (totals.first_norm, totals.first_count) == (None, 2.0)


def test_a_rank_without_memory_sends_only_that() -> None:
    assert figures_of(OutOfMemory("full", size=2), 15)[:3] == (1, 15, 0)
