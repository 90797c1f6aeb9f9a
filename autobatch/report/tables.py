"""Tables of text that set results side by side: GPUs of an estimate, memory of a step, runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from autobatch.core.options import all_fields
from autobatch.core.records import (
    Attempt,
    Estimate,
    Plan,
    RankEstimate,
    Recorded,
    RunRecord,
    Training,
    Trial,
)
from autobatch.core.text import module_in_words
from autobatch.core.units import format_bytes
from autobatch.report.facts import describe_split, peak_bytes
from autobatch.report.words import count, decimal, knobs_in_words, metric_in_words, moment, plural

T = TypeVar("T")
TOP_MODULES = 5
"""Modules that an explanation names, those with the most activations."""


class Table(NamedTuple):
    """A table of text; the first column names the row."""

    caption: str
    head: list[str]
    rows: list[list[str]]


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
        "Micro-batch": lambda ran: count(ran.micro_batch),
        "Result": lambda ran: "fits" if ran.fits else "does not fit",
        "Peak allocated": lambda ran: format_bytes(ran.peak_allocated_bytes),
        "Peak reserved": lambda ran: format_bytes(ran.peak_reserved_bytes),
        "Seconds": lambda ran: decimal(ran.seconds, 3),
        "Reason": lambda ran: " in ".join(filter(None, (ran.reason, ran.phase))),
    }
    return table_of("Every size that ran, in order", attempts, cells)


def trials_table(trials: Sequence[Trial]) -> Table:
    """Return a row for each trial. They count from 1 here, as on the terminal, and from 0 in Optuna."""

    def knob(name: str) -> Callable[[Trial], str]:
        return lambda trial: str(trial.parameters.get(name, ""))

    cells: dict[str, Callable[[Trial], str]] = {
        "Trial": lambda trial: count(trial.number + 1),
        "Samples/s": lambda trial: "" if trial.samples_per_s is None else decimal(trial.samples_per_s),
        "÷ default": lambda trial: "" if trial.relative is None else f"{trial.relative:.3f}",
        "Beyond the noise": lambda trial: "faster" if trial.is_faster else "",
        **{name: knob(name) for name in sorted({name for trial in trials for name in trial.parameters})},
        "Note": lambda trial: trial.note or "",
    }
    infeasible = sum(trial.relative is None for trial in trials)
    return table_of(f"{plural(len(trials), 'trial')}, {infeasible} infeasible", trials, cells)


def gpu_table(estimates: Sequence[Estimate]) -> Table:
    """Return a row for each GPU."""

    def interval(gpu: Estimate) -> str:
        low, high = gpu.micro_batch_low, gpu.micro_batch_high
        return "" if low == high else f"{count(low)} to {count(high)}"

    cells: dict[str, Callable[[Estimate], str]] = {
        "GPU": lambda gpu: gpu.profile,
        "budget": lambda gpu: format_bytes(gpu.budget_bytes),
        "micro-batch": lambda gpu: count(gpu.micro_batch) if gpu.fits else "does not fit",
        "interval": interval,
        "reserved": lambda gpu: format_bytes(gpu.peak_reserved_bytes),
        "precision": lambda gpu: gpu.precision or "",
        "steps": lambda gpu: "" if gpu.plan is None else count(gpu.plan.accumulation_steps),
    }
    return table_of("What is predicted to fit", estimates, cells)


def rank_table(cells: Sequence[RankEstimate]) -> Table:
    """Return the largest micro-batch of a rank: a row for each GPU, a column for each number of ranks."""
    worlds = list(dict.fromkeys(cell.world_size for cell in cells))
    limits = {(cell.profile, cell.world_size): cell.micro_batch for cell in cells}
    rows = [
        [gpu, *(count(limits[gpu, world]) if limits.get((gpu, world)) else "–" for world in worlds)]
        for gpu in dict.fromkeys(cell.profile for cell in cells)
    ]
    head = ["GPU", *(f"{count(world)} {'rank' if world == 1 else 'ranks'}" for world in worlds)]
    return Table("largest micro-batch of a rank", head, rows)


def memory_table(gpu: Estimate) -> Table:
    """Return what uses the memory of one GPU at the peak."""
    sizes: list[tuple[str, int]] = []
    for kind, size in gpu.memory.items():
        sizes.append((kind, size))
        if kind == "activations":
            largest = list(gpu.modules.items())[:TOP_MODULES]
            sizes += [(f"  {module_in_words(name)}", own) for name, own in largest]
    phase = f", phase {gpu.phase}" if gpu.phase else ""
    caption = f"memory at the peak of micro-batch {max(1, gpu.micro_batch):,}{phase}"
    return _shares(caption, sizes, sum(gpu.memory.values()))


def recorded_tables(recorded: Recorded) -> list[Table]:
    """Return where the memory of a recorded program went, and the GPUs on which it would run."""
    caption = "memory at the peak" if recorded.refused is None else "memory when it ran out"
    words = {(True, True): "yes", (False, True): "with expandable_segments:True", (False, False): "no"}
    words[True, False] = "yes, without expandable_segments"
    gpus = [
        [fit.profile, format_bytes(fit.budget_bytes), words[fit.fits, fit.fits_expandable]]
        for fit in recorded.fits
    ]
    return [
        _shares(caption, recorded.memory.items(), sum(recorded.memory.values())),
        Table("where it would run", ["GPU", "budget", "runs"], gpus),
    ]


def _shares(caption: str, sizes: Iterable[tuple[str, int]], total: int) -> Table:
    rows = [[name, format_bytes(size), f"{size / total:.0%}"] for name, size in sizes if size]
    return Table(caption, [caption, "bytes", "share"], rows)


def remedy_lines(gpu: Estimate) -> Iterator[str]:
    """Yield what would let more fit on one GPU."""
    for remedy in gpu.remedies or ():
        figure = count(remedy.micro_batch) if remedy.micro_batch else "does not fit"
        yield f"  {figure:>7}  {remedy.advice} (peak {format_bytes(remedy.peak_bytes)})"


class Comparison(NamedTuple):
    """Runs side by side: for the name of each figure its cells, one for each run."""

    given: dict[str, list[str]]
    """Hardware, options and versions."""
    reached: dict[str, list[str]]
    """Figures that the runs planned and reached, without those that no run has."""

    @property
    def differing(self) -> dict[str, list[str]]:
        """The hardware, options and versions that differ."""
        return {name: cells for name, cells in self.given.items() if len(set(cells)) > 1}


def compare_runs(runs: Sequence[RunRecord]) -> Comparison:
    """Set runs side by side."""

    def planned(cell: Callable[[Plan], str]) -> list[str]:
        return ["" if run.plan is None else cell(run.plan) for run in runs]

    def trained(cell: Callable[[Training], str]) -> list[str]:
        return ["" if run.training is None else cell(run.training) for run in runs]

    def held_out(name: str) -> list[str]:
        return trained(
            lambda training: (
                metric_in_words(name, training.validation[name]).removeprefix(f"{name} ")
                if name in training.validation
                else ""
            )
        )

    def recorded(field: str, *, prefix: str = "", unset: str = "–") -> dict[str, list[str]]:
        records: list[dict[str, object]] = [getattr(run, field) for run in runs]
        names = sorted({name for record in records for name in record} - hidden)
        return {
            prefix + (name.replace("_", "-") if prefix else name): [
                unset if record.get(name) is None else str(record[name]) for record in records
            ]
            for name in names
            if any(record.get(name) is not None for record in records)
        }

    # Where a run writes and what it prints is no difference.
    hidden = {name for name, field in all_fields().items() if field.group == "output"} | {"out", "resume"}
    metrics = dict.fromkeys(name for run in runs if run.training for name in run.training.validation)
    given = {
        "workload": [run.title or "–" for run in runs],
        "device": [run.device.name for run in runs],
        "budget": [format_bytes(run.device.budget_bytes) for run in runs],
        **recorded("surroundings"),
        **recorded("versions"),
        **recorded("options", prefix="--", unset="not set"),
        "precision": planned(lambda plan: plan.precision),
        "tuned": planned(lambda plan: knobs_in_words(plan.knobs)),
    }
    reached = {
        "batch": planned(lambda plan: count(plan.target_batch)),
        "split": planned(describe_split),
        "learning rate": planned(lambda plan: decimal(plan.learning_rate, 3)),
        **{f"held-out {name}": held_out(name) for name in metrics},
        "training loss": trained(lambda training: decimal(training.final_loss)),
        "steps": trained(lambda training: count(training.optimizer_steps)),
        "samples/s": trained(lambda training: decimal(training.samples_per_s)),
        "time, s": trained(lambda training: decimal(training.seconds, 3)),
        "peak memory": trained(lambda training: format_bytes(peak) if (peak := peak_bytes(training)) else ""),
        "recoveries": trained(lambda training: count(training.oom_recoveries)),
        "date": [moment(run.created) if run.created else "" for run in runs],
    }
    return Comparison(given, {name: cells for name, cells in reached.items() if any(cells)})
