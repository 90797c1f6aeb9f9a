"""Tables of text: the sizes and trials of a run, runs compared, and all that an estimate says."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from autobatch.core.options import all_fields, spelled
from autobatch.core.records import Attempt, Estimate, Recorded, RunRecord, Trial
from autobatch.core.text import module_in_words, printable
from autobatch.core.units import format_bytes, significant
from autobatch.report.facts import facts_of, moment, plural

Columns = dict[str, list[str]]
"""For the name of each figure its texts, one for each record; a text is empty if its record has none."""
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


def columns_of(records: Sequence[Mapping[str, str]]) -> Columns:
    """Return the texts of records by name, without those that are empty for all of them."""
    names = dict.fromkeys(name for record in records for name in record)
    columns = {name: [record.get(name, "") for record in records] for name in names}
    return {name: column for name, column in columns.items() if any(column)}


def table_of(caption: str, records: Sequence[Mapping[str, str]]) -> Table:
    """Return a table with a row for each record."""
    columns = columns_of(records)
    return Table(caption, list(columns), list(map(list, zip(*columns.values(), strict=True))))


def attempts_table(attempts: Sequence[Attempt]) -> Table:
    """Return a row for each size that ran."""
    records = [
        {
            "Micro-batch": f"{ran.micro_batch:,}",
            "Result": "fits" if ran.fits else "does not fit",
            "Peak allocated": format_bytes(ran.peak_allocated_bytes),
            "Peak reserved": format_bytes(ran.peak_reserved_bytes),
            "Seconds": significant(ran.seconds),
            "Reason": " in ".join(filter(None, (ran.reason, ran.phase))),
        }
        for ran in attempts
    ]
    return table_of("Every size that ran, in order", records)


def trials_table(trials: Sequence[Trial]) -> Table:
    """Return a row for each trial. They count from 1 here, as on the terminal, and from 0 in Optuna."""
    knobs = sorted({name for trial in trials for name in trial.parameters})
    records = [
        {
            "Trial": str(trial.number + 1),
            "Samples/s": "" if trial.samples_per_s is None else significant(trial.samples_per_s, 4),
            "÷ default": "" if trial.relative is None else f"{trial.relative:.3f}",
            "Beyond the noise": "faster" if trial.is_faster else "",
            **{name: str(trial.parameters.get(name, "")) for name in knobs},
            "Note": trial.note or "",
        }
        for trial in trials
    ]
    infeasible = sum(trial.relative is None for trial in trials)
    return table_of(f"{plural(len(trials), 'trial')}, {infeasible} infeasible", records)


def estimate_lines(
    estimates: Sequence[Estimate], recorded: Recorded | None, width: int | None = None
) -> Iterator[str]:
    """Yield what is predicted, at the width of a terminal: what fits, and where memory goes."""
    if recorded is not None:
        yield from _recorded_lines(recorded)
        return
    records = [
        {
            "GPU": gpu.profile,
            "budget": format_bytes(gpu.budget_bytes),
            "micro-batch": f"{gpu.micro_batch:,}" if gpu.fits else "does not fit",
            "interval": ""
            if gpu.micro_batch_low == gpu.micro_batch_high
            else f"{gpu.micro_batch_low:,} to {gpu.micro_batch_high:,}",
            "reserved": format_bytes(gpu.peak_reserved_bytes),
            "precision": gpu.precision or "",
            "steps": "" if gpu.plan is None else f"{gpu.plan.accumulation_steps:,}",
        }
        for gpu in estimates
    ]
    table = table_of("", records)
    yield from aligned([table.head, *table.rows], width)
    if len(estimates) == 1:
        yield from ("", *_memory_lines(estimates[0]))
        remedies = estimates[0].remedies or []
        yield from ("", "predicted micro-batch with a change:") if remedies else ()
        for remedy in remedies:
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


def compare_runs(runs: Sequence[RunRecord]) -> tuple[Columns, Columns]:
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
    return columns_of(given), columns_of(reached)
