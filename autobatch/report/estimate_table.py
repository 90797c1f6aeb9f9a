"""Tables of an estimate: what fits on each GPU, and where the memory of one goes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.table import Table

from autobatch.core.text import printable
from autobatch.core.units import format_bytes

if TYPE_CHECKING:
    from autobatch.core.records import Estimate
    from autobatch.report.result import Estimates

TOP_MODULES = 5
"""Modules that an explanation names, those with the most activations."""


def gpu_table(estimates: Estimates) -> Table:
    """Return a row for each GPU. Columns that are empty for all GPUs are left out."""
    columns: dict[str, list[str]] = {
        "GPU": [printable(one.profile) for one in estimates.estimates],
        "budget": [format_bytes(one.budget_bytes) for one in estimates.estimates],
        "micro-batch": [
            f"{one.micro_batch:,}" if one.fits else "does not fit" for one in estimates.estimates
        ],
        "interval": [_interval(one) for one in estimates.estimates],
        "reserved": [format_bytes(one.peak_reserved_bytes) for one in estimates.estimates],
        "precision": [one.precision for one in estimates.estimates],
        "steps": [
            "" if one.plan is None else f"{one.plan.accumulation_steps:,}" for one in estimates.estimates
        ],
    }
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    table = Table(box=None, pad_edge=False)
    for name in shown:
        table.add_column(name, justify="left" if name == "GPU" else "right", no_wrap=True)
    for row in zip(*shown.values(), strict=True):
        table.add_row(*row)
    return table


def rank_table(estimates: Estimates) -> Table:
    """Return the largest micro-batch of a rank: a row for each number of ranks, a column for each GPU."""
    cells = estimates.over_ranks
    table = Table(box=None, pad_edge=False)
    table.add_column("ranks", justify="right", no_wrap=True)
    gpus = list(dict.fromkeys(cell.profile for cell in cells))
    for gpu in gpus:
        table.add_column(printable(gpu), justify="right", no_wrap=True)
    for world in dict.fromkeys(cell.world_size for cell in cells):
        of = {cell.profile: cell.micro_batch for cell in cells if cell.world_size == world}
        table.add_row(f"{world:,}", *(f"{of[gpu]:,}" if of.get(gpu) else "–" for gpu in gpus))
    return table


def _interval(one: Estimate) -> str:
    """Return the interval of the limit; empty if it is a single size."""
    low, high = one.micro_batch_low, one.micro_batch_high
    return "" if low == high else f"{low:,} to {high:,}"


def memory_table(one: Estimate) -> Table:
    """Return what uses the memory of one GPU at the peak."""
    total = sum(one.memory.values())
    modules = [(f"  {name}", size) for name, size in list(one.modules.items())[:TOP_MODULES] if size]
    parts: list[tuple[str, int]] = []
    for kind, size in one.memory.items():
        parts += [(kind, size)] if size else []
        parts += modules if kind == "activations" else []
    at = f"memory at the peak of micro-batch {max(1, one.micro_batch):,}, phase {one.phase}"
    table = Table(box=None, pad_edge=False)
    table.add_column(at, overflow="fold")
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    for name, size in parts:
        table.add_row(printable(name), format_bytes(size), f"{size / max(total, 1):.0%}")
    return table


def size_lines(one: Estimate) -> Iterator[str]:
    """Yield what fits of each size of sample, and what a split by size would save."""
    if len(one.lengths) > 1:
        tokens = "tokens" if one.size_unit else "size"
        yield f"predicted micro-batch by {tokens} of the longest sample in it:"
        # Of sizes with one limit, the largest says it all.
        for limit in {each.micro_batch: each for each in one.lengths}.values():
            total = f"{limit.padded_size:,.0f} {one.size_unit} per micro-batch" if one.size_unit else ""
            yield f"  {limit.micro_batch:>7,}  up to {limit.size:g}  {total}".rstrip()
    cut = one.size_cut
    if cut is not None and cut.padding is not None and cut.padding_by_count is not None:
        yield (
            f"a split by size would compute {cut.padding:.2f} elements for each real one, a split by count "
            f"{cut.padding_by_count:.2f} (in {cut.steps:.1f} and {cut.steps_by_count:.0f} micro-batches)"
        )


def remedy_lines(one: Estimate) -> Iterator[str]:
    """Yield what would let more fit on one GPU."""
    for remedy in one.remedies or ():
        figure = f"{remedy.micro_batch:,}" if remedy.micro_batch else "does not fit"
        yield printable(f"  {figure:>7}  {remedy.advice} (peak {format_bytes(remedy.peak_bytes)})")
