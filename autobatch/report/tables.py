"""Tables of text that set results side by side: GPUs of an estimate, memory of a step, runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from autobatch.core.options import all_fields
from autobatch.core.records import Estimate, Plan, RankEstimate, Recorded, RunRecord, Training
from autobatch.core.text import module_in_words
from autobatch.core.units import format_bytes
from autobatch.report.facts import describe_split, peak_bytes
from autobatch.report.words import count, decimal, knobs_in_words, metric_in_words, moment

TOP_MODULES = 5
"""Modules that an explanation names, those with the most activations."""


class Table(NamedTuple):
    """A table of text; the first column names the row."""

    caption: str
    head: list[str]
    rows: list[list[str]]


def gpu_table(estimates: Sequence[Estimate]) -> Table:
    """Return a row for each GPU. Columns that are empty for all GPUs are left out."""
    cells: dict[str, Callable[[Estimate], str]] = {
        "GPU": lambda one: one.profile,
        "budget": lambda one: format_bytes(one.budget_bytes),
        "micro-batch": lambda one: count(one.micro_batch) if one.fits else "does not fit",
        "interval": _interval,
        "reserved": lambda one: format_bytes(one.peak_reserved_bytes),
        "precision": lambda one: one.precision or "",
        "steps": lambda one: "" if one.plan is None else count(one.plan.accumulation_steps),
    }
    columns = {name: [cell(one) for one in estimates] for name, cell in cells.items()}
    shown = {name: column for name, column in columns.items() if any(column)}
    return Table("What is predicted to fit", list(shown), list(map(list, zip(*shown.values(), strict=True))))


def _interval(one: Estimate) -> str:
    """Return the interval of the limit; empty if it is a single size."""
    low, high = one.micro_batch_low, one.micro_batch_high
    return "" if low == high else f"{count(low)} to {count(high)}"


def rank_table(cells: Sequence[RankEstimate]) -> Table:
    """Return the largest micro-batch of a rank: a row for each GPU, a column for each number of ranks."""
    worlds = list(dict.fromkeys(cell.world_size for cell in cells))
    found = {(cell.profile, cell.world_size): cell.micro_batch for cell in cells}
    rows = [
        [gpu, *(count(found[gpu, world]) if found.get((gpu, world)) else "–" for world in worlds)]
        for gpu in dict.fromkeys(cell.profile for cell in cells)
    ]
    head = ["GPU", *(f"{count(world)} {'rank' if world == 1 else 'ranks'}" for world in worlds)]
    return Table("largest micro-batch of a rank", head, rows)


def memory_table(one: Estimate) -> Table:
    """Return what uses the memory of one GPU at the peak."""
    total = max(1, sum(one.memory.values()))
    sizes: list[tuple[str, int]] = []
    for kind, size in one.memory.items():
        sizes.append((kind, size))
        if kind == "activations":
            sizes += [
                (f"  {module_in_words(name)}", own) for name, own in list(one.modules.items())[:TOP_MODULES]
            ]
    phase = f", phase {one.phase}" if one.phase else ""
    caption = f"memory at the peak of micro-batch {max(1, one.micro_batch):,}{phase}"
    rows = [[name, format_bytes(size), f"{size / total:.0%}"] for name, size in sizes if size]
    return Table(caption, [caption, "bytes", "share"], rows)


def recorded_tables(recorded: Recorded) -> list[Table]:
    """Return where the memory of a recorded program went, and the GPUs on which it would run."""
    total = max(1, sum(recorded.memory.values()))
    caption = "memory at the peak" if recorded.refused is None else "memory when it ran out"
    lines = [[line, format_bytes(size), f"{size / total:.0%}"] for line, size in recorded.memory.items()]
    words = {(True, True): "yes", (False, True): "with expandable_segments:True", (False, False): "no"}
    words[True, False] = "yes, without expandable_segments"
    gpus = [
        [fit.profile, format_bytes(fit.budget_bytes), words[fit.fits, fit.fits_expandable]]
        for fit in recorded.fits
    ]
    return [
        Table(caption, [caption, "bytes", "share"], lines),
        Table("where it would run", ["GPU", "budget", "runs"], gpus),
    ]


def remedy_lines(one: Estimate) -> Iterator[str]:
    """Yield what would let more fit on one GPU."""
    for remedy in one.remedies or ():
        figure = count(remedy.micro_batch) if remedy.micro_batch else "does not fit"
        yield f"  {figure:>7}  {remedy.advice} (peak {format_bytes(remedy.peak_bytes)})"


class Comparison(NamedTuple):
    """Runs side by side: a row for each figure, a column for each run."""

    names: list[str]
    given: dict[str, list[str]]
    """Hardware, options and versions of the runs, by name."""
    reached: dict[str, list[str]]
    """What each run planned and reached; figures that no run has are left out."""

    @property
    def differing(self) -> Table:
        """The options, versions and hardware that differ."""
        given = {name: values for name, values in self.given.items() if len(set(values)) > 1}
        return self._table("Options, versions and hardware that differ", given)

    @property
    def figures(self) -> Table:
        """The figures that each run planned and reached."""
        return self._table("What each run planned and reached", self.reached)

    def _table(self, caption: str, rows: dict[str, list[str]]) -> Table:
        return Table(caption, ["", *self.names], [[name, *values] for name, values in rows.items()])


def compare_runs(runs: Sequence[RunRecord], names: Sequence[str]) -> Comparison:
    """Set runs side by side.

    Args:
        runs: the runs.
        names: what they are called, for example their folders.
    """

    def planned(cell: Callable[[Plan], str]) -> list[str]:
        return ["" if run.plan is None else cell(run.plan) for run in runs]

    def trained(cell: Callable[[Training], str]) -> list[str]:
        return ["" if run.training is None else cell(run.training) for run in runs]

    def recorded(field: str, *, hidden: Collection[str] = ()) -> Iterator[tuple[str, list[str]]]:
        records: list[dict[str, object]] = [getattr(run, field) for run in runs]
        for name in sorted({name for record in records for name in record} - set(hidden)):
            values = [record.get(name) for record in records]
            label, none = (f"--{name.replace('_', '-')}", "not set") if field == "options" else (name, "–")
            if any(value is not None for value in values):
                yield label, [none if value is None else str(value) for value in values]

    # Where a run writes and what it prints is no difference.
    output = [name for name, field in all_fields().items() if field.section == "output"]
    metrics = dict.fromkeys(name for run in runs if run.training for name in run.training.validation)
    given = {
        "workload": [run.title or "–" for run in runs],
        "device": [run.device.name for run in runs],
        "budget": [format_bytes(run.device.budget_bytes) for run in runs],
        **dict(recorded("surroundings")),
        **dict(recorded("versions")),
        **dict(recorded("options", hidden=[*output, "out", "resume"])),
        "precision": planned(lambda plan: plan.precision),
        "tuned": planned(lambda plan: knobs_in_words(plan.knobs)),
    }
    reached = {
        "batch": planned(lambda plan: count(plan.target_batch)),
        "split": planned(describe_split),
        "learning rate": planned(lambda plan: f"{plan.learning_rate:.3g}"),
        **{f"held-out {name}": trained(lambda one, name=name: _held_out(one, name)) for name in metrics},  # type: ignore[misc]
        "training loss": trained(lambda one: decimal(one.final_loss)),
        "steps": trained(lambda one: count(one.optimizer_steps)),
        "samples/s": trained(lambda one: decimal(one.samples_per_s)),
        "time, s": trained(lambda one: decimal(one.seconds, 3)),
        "peak memory": trained(lambda one: format_bytes(peak_bytes(one)) if peak_bytes(one) else ""),
        "recoveries": trained(lambda one: count(one.oom_recoveries)),
        "date": [moment(run.created) if run.created else "" for run in runs],
    }
    return Comparison(list(names), given, {name: row for name, row in reached.items() if any(row)})


def _held_out(training: Training, name: str) -> str:
    if name not in training.validation:
        return ""
    return metric_in_words(name, training.validation[name]).removeprefix(f"{name} ")
