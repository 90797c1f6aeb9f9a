"""Tables of text: the sizes and trials of a run, runs compared, and all that an estimate says."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from autobatch.core.options import all_fields, spelled
from autobatch.core.records import Attempt, Estimate, Recorded, RunRecord, Trial
from autobatch.core.text import module_in_words, printable
from autobatch.core.units import format_bytes, significant
from autobatch.report.facts import facts_of, moment, plural

T = TypeVar("T")
WIDEST_FIGURE = 16
"""Columns of the widest cell of a column of figures."""
TOP_MODULES = 5
"""Modules that an explanation names, those with the most activations."""


class Table(NamedTuple):
    """A table of text; the first column names the row."""

    caption: str
    head: list[str]
    rows: list[list[str]]


def aligned(rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Return rows as lines of text with columns of equal width. Narrow ones with numbers end at their right.

    If the table is wider than the terminal, the cells of each row follow its first one, a line each.

    Args:
        rows: the cells. The first row names the columns, the first column the rows.
        width: of the terminal; None for no limit.
    """
    table = [[printable(cell) for cell in row] for row in rows]
    columns = list(zip(*table, strict=True))
    wide = [max(map(len, column)) for column in columns]
    if width is not None and sum(wide) + 2 * len(wide) - 2 > width:
        names = [name.ljust(max(map(len, table[0][1:]))) for name in table[0]]
        lines = [
            f"  {name}  {cell}" if at else cell
            for row in table[1:]
            for at, (name, cell) in enumerate(zip(names, row, strict=True))
            if cell
        ]
        return [part for line in lines for part in folded(line, width, 4)]
    is_figure = [
        at > 0 and wide[at] <= WIDEST_FIGURE and any(cell[:1].isdigit() for cell in column)
        for at, column in enumerate(columns)
    ]
    return [
        "  ".join(
            cell.rjust(wide[at]) if is_figure[at] else cell.ljust(wide[at]) for at, cell in enumerate(row)
        ).rstrip()
        for row in table
    ]


def folded(line: str, width: int | None, indent: int) -> list[str]:
    """Wrap a line between its words, with its rest indented; None for no limit of the width."""
    if width is None:
        return [line]
    rest = " " * min(indent, width // 2)
    lines = textwrap.wrap(line, width, subsequent_indent=rest, break_on_hyphens=False, break_long_words=False)
    return lines or [""]


def table_of(caption: str, records: Sequence[T], cells: Mapping[str, Callable[[T], str]]) -> Table:
    """Return a table with a row for each record. Columns that are empty for all of them are left out.

    Args:
        caption: the caption.
        records: the records.
        cells: for each column its name, and the text of a record in it.
    """
    columns = {name: [cell(record) for record in records] for name, cell in cells.items()}
    shown = {name: column for name, column in columns.items() if any(column)}
    return Table(caption, list(shown), list(map(list, zip(*shown.values(), strict=True))))


def attempts_table(attempts: Sequence[Attempt]) -> Table:
    """Return a row for each size that ran."""
    cells: dict[str, Callable[[Attempt], str]] = {
        "Micro-batch": lambda ran: f"{ran.micro_batch:,}",
        "Result": lambda ran: "fits" if ran.fits else "does not fit",
        "Peak allocated": lambda ran: format_bytes(ran.peak_allocated_bytes),
        "Peak reserved": lambda ran: format_bytes(ran.peak_reserved_bytes),
        "Seconds": lambda ran: significant(ran.seconds),
        "Reason": lambda ran: " in ".join(filter(None, (ran.reason, ran.phase))),
    }
    return table_of("Every size that ran, in order", attempts, cells)


def trials_table(trials: Sequence[Trial]) -> Table:
    """Return a row for each trial. They count from 1 here, as on the terminal, and from 0 in Optuna."""

    def knob(name: str) -> Callable[[Trial], str]:
        return lambda trial: str(trial.parameters.get(name, ""))

    cells: dict[str, Callable[[Trial], str]] = {
        "Trial": lambda trial: str(trial.number + 1),
        "Samples/s": lambda trial: "" if trial.samples_per_s is None else significant(trial.samples_per_s, 4),
        "÷ default": lambda trial: "" if trial.relative is None else f"{trial.relative:.3f}",
        "Beyond the noise": lambda trial: "faster" if trial.is_faster else "",
        **{name: knob(name) for name in sorted({name for trial in trials for name in trial.parameters})},
        "Note": lambda trial: trial.note or "",
    }
    infeasible = sum(trial.relative is None for trial in trials)
    return table_of(f"{plural(len(trials), 'trial')}, {infeasible} infeasible", trials, cells)


def estimate_lines(
    estimates: Sequence[Estimate], recorded: Recorded | None, width: int | None = None
) -> Iterator[str]:
    """Yield what is predicted, at the width of a terminal: what fits, and where memory goes."""
    if recorded is not None:
        yield from _recorded_lines(recorded)
        return
    cells: dict[str, Callable[[Estimate], str]] = {
        "GPU": lambda gpu: gpu.profile,
        "budget": lambda gpu: format_bytes(gpu.budget_bytes),
        "micro-batch": lambda gpu: f"{gpu.micro_batch:,}" if gpu.fits else "does not fit",
        "interval": lambda gpu: (
            ""
            if gpu.micro_batch_low == gpu.micro_batch_high
            else f"{gpu.micro_batch_low:,} to {gpu.micro_batch_high:,}"
        ),
        "reserved": lambda gpu: format_bytes(gpu.peak_reserved_bytes),
        "precision": lambda gpu: gpu.precision or "",
        "steps": lambda gpu: "" if gpu.plan is None else f"{gpu.plan.accumulation_steps:,}",
    }
    table = table_of("", estimates, cells)
    yield from aligned([table.head, *table.rows], width)
    for gpu in estimates:
        is_alone = len(estimates) == 1
        if is_alone:
            yield from ("", *_memory_lines(gpu))
        if gpu.remedies and (is_alone or not gpu.fits):
            on = "" if is_alone else f" on {gpu.profile}"
            yield from ("", f"predicted micro-batch{on} with a change:")
        for remedy in gpu.remedies or () if is_alone or not gpu.fits else ():
            figure = f"{remedy.micro_batch:,}" if remedy.micro_batch else "does not fit"
            yield f"  {figure:>7}  {remedy.advice} (peak {format_bytes(remedy.peak_bytes)})"


def _memory_lines(gpu: Estimate) -> list[str]:
    """Return what uses the memory of one GPU at the peak."""
    sizes: list[tuple[str, int]] = []
    for kind, size in gpu.memory.items():
        sizes.append((kind, size))
        if kind == "activations":
            largest = list(gpu.modules.items())[:TOP_MODULES]
            sizes += [(f"  {module_in_words(name)}", own) for name, own in largest]
    phase = f", phase {gpu.phase}" if gpu.phase else ""
    caption = f"memory at the peak of micro-batch {max(1, gpu.micro_batch):,}{phase}"
    return _share_lines(caption, sizes)


def _share_lines(caption: str, sizes: Sequence[tuple[str, int]]) -> list[str]:
    total = sum(size for name, size in sizes if not name.startswith("  "))
    rows = [[f"  {name}", format_bytes(size), f"{size / total:.0%}"] for name, size in sizes if size]
    return [f"{caption}:", *(aligned(rows) if rows else [])]


def _recorded_lines(recorded: Recorded) -> Iterator[str]:
    """Yield what a program took that was recorded, why memory ran out, and where it would run."""
    reserved, refused = recorded.peak_reserved_bytes, recorded.refused
    gap, expandable = reserved - recorded.peak_allocated_bytes, format_bytes(recorded.expandable_bytes)
    yield (
        f"peak reserved {format_bytes(reserved)}, allocated {format_bytes(recorded.peak_allocated_bytes)}: "
        f"{format_bytes(gap)} between them ({gap / max(1, reserved):.0%}) are fragmentation"
    )
    if refused is None:
        yield f"expandable_segments:True would reserve {expandable}"
    else:
        unused = refused.reserved_bytes - refused.allocated_bytes
        verdict = {
            "fragmented": "as much was free, but in pieces: fragmented",
            "limited": "the GPU had enough: a limit of the process held it back",
            "full": f"it lacked {format_bytes(refused.asked_bytes - unused - refused.device_free_bytes)}",
        }
        yield (
            f"out of memory: asked for {format_bytes(refused.asked_bytes)}, and free were "
            f"{format_bytes(refused.device_free_bytes)} on the GPU and {format_bytes(unused)} of the "
            f"{format_bytes(refused.reserved_bytes)} that were reserved; {verdict[refused.reason]}"
        )
        yield (
            f"with that request it needs {format_bytes(recorded.needed_bytes)}, and {expandable} with "
            "expandable_segments:True, and more later"
        )
    caption = "memory at the peak" if refused is None else "memory when it ran out"
    yield from ("", *_share_lines(caption, [*recorded.memory.items()]), "")
    words = {(True, True): "yes", (False, True): "with expandable_segments:True", (False, False): "no"}
    words[True, False] = "yes, without expandable_segments"
    gpus = [[gpu, words[fits, recorded.fits_expandable[gpu]]] for gpu, fits in recorded.fits.items()]
    yield from aligned([["GPU", "runs"], *gpus])


Rows = dict[str, list[str]]
"""For the name of each figure its cells, one for each run; a cell is empty if its run has no such figure."""


def compare_runs(runs: Sequence[RunRecord]) -> tuple[Rows, Rows]:
    """Return what runs were given, and what they planned and reached, without what no run has."""
    # Where a run writes and what it prints is no difference.
    hidden = {name for name, field in all_fields().items() if field.group == "output"} | {"out", "resume"}
    given, reached = [], []
    for run in runs:
        options = {name: value for name, value in run.options.items() if value is not None}
        facts = [fact for fact in facts_of(run) if fact.label and fact.part != "files"]
        given.append(
            {
                "workload": run.title or "",
                **{fact.label: fact.text for fact in facts if fact.part == "device"},
                **run.versions,
                **{spelled(name): str(options[name]) for name in options if name not in hidden},
            }
        )
        known = {fact.label: fact.text for fact in facts if fact.part != "device"}
        reached.append(known | {"date": moment(run.created)})
    return _side_by_side(given), _side_by_side(reached)


def _side_by_side(records: Sequence[Mapping[str, str]]) -> Rows:
    names = dict.fromkeys(name for record in records for name in record)
    rows = {name: [record.get(name, "") for record in records] for name in names}
    return {name: cells for name, cells in rows.items() if any(cells)}
