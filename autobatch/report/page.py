"""One self-contained HTML file: readable anywhere, with no network, no script and no other file."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from autobatch.core.files import write_atomic
from autobatch.core.records import DeviceRecord, LrTuning, RunRecord
from autobatch.core.units import format_bytes
from autobatch.report.charts import curves, trials
from autobatch.report.charts import memory as figures
from autobatch.report.charts.drawing import Picture, Table
from autobatch.report.charts.memory import held_bytes, memory_curve_figure
from autobatch.report.charts.split import plan_figure
from autobatch.report.charts.trials import pairs_table, rates_figure
from autobatch.report.html import Child, Markup, element, facts, figure, join, table
from autobatch.report.sentences import (
    budget_in_words,
    count,
    decimal,
    fits_in_words,
    headline,
    plural,
    rate_in_words,
    rates_in_words,
    split_in_words,
    training_in_words,
    tuning_in_words,
)
from autobatch.report.theme import style_sheet


class Section(NamedTuple):
    """One part of the page."""

    slug: str
    title: str
    body: Markup


def sections(data: RunRecord) -> list[Section]:
    """Build every part that there are data for, in reading order."""
    candidates = [
        Section("device", "Device and budget", _device(data.device)),
        Section("memory", "What fits", _memory(data)),
        Section("plan", "Plan", _plan(data)),
        Section("tuning", "Tuning", _tuning(data)),
        Section("training", "Training", _training(data)),
        Section("repeat", "Repeat this run", _repeat(data)),
    ]
    return [section for section in candidates if section.body]


def _pictures(*pictures: Picture | None) -> list[Markup]:
    return [figure(picture) for picture in pictures if picture is not None]


def _notes(lines: list[str]) -> Markup | None:
    return element("ul", [element("li", line) for line in lines], class_="notes") if lines else None


def _device(device: DeviceRecord) -> Markup:
    holders = [
        [
            holder.name or "unknown",
            "" if holder.pid is None else str(holder.pid),
            format_bytes(holder.used_bytes),
        ]
        for holder in device.holders
    ]
    held = Table(caption="Who holds memory of this device", head=["Process", "Pid", "Memory"], rows=holders)
    return join(
        element("p", budget_in_words(device)),
        _bar(device),
        facts(
            [
                ("Device", f"{device.name} ({device.kind})"),
                ("Memory", format_bytes(device.total_bytes)),
                ("Other processes", format_bytes(device.other_processes_bytes)),
            ]
        ),
        _notes(device.notes),
        table(held) if holders else None,
    )


def _bar(device: DeviceRecord) -> Markup:
    """Draw the memory of the device as one bar: others, the budget, and what is left aside."""
    others = device.other_processes_bytes or 0
    rest = max(device.total_bytes - device.budget_bytes - others, 0)
    parts = [("budget", "accent", device.budget_bytes), ("other processes", "series-3", others)]
    parts = [part for part in [*parts, ("left aside or in use", "rule", rest)] if part[2]]
    names = [f"{name} {format_bytes(size)}" for name, _, size in parts]
    blocks = [element("span", style=f"--mark:var(--{role});flex:{size} 1 0") for _, role, size in parts]
    marks = [
        element(
            "li",
            element("span", class_="mark block", style=f"--mark:var(--{role})", aria_hidden="true"),
            name,
        )
        for (_, role, _), name in zip(parts, names, strict=True)
    ]
    label = f"Memory of the device: {', '.join(names)}"
    return join(
        element("div", blocks, class_="bar", role="img", aria_label=label),
        element("ul", marks, class_="legend"),
    )


def _memory(data: RunRecord) -> Markup:
    probe = data.probe
    curve = memory_curve_figure(data.memory_curve) if data.memory_curve else None
    if probe is None:
        return join(_pictures(curve))
    pictures = _pictures(figures.memory_figure(data.device, probe, data.predicted), curve)
    predicted = None if probe.predicted_micro_batch is None else count(probe.predicted_micro_batch)
    pairs: list[tuple[str, Child]] = [
        ("Largest micro-batch", plural(probe.micro_batch, "sample")),
        ("Limited by", probe.limited_by.replace("_", " ")),
        ("Predicted before it ran", predicted),
    ]
    return join(element("p", fits_in_words(probe)), pictures, facts(pairs))


def _plan(data: RunRecord) -> Markup:
    plan = data.plan
    if plan is None:
        return Markup()
    chosen = ", ".join(f"{name} = {value}" for name, value in plan.knobs.items())
    words = (
        f"Every optimizer step takes exactly {plural(plan.target_batch, 'sample')}: {split_in_words(plan)}."
    )
    pairs: list[tuple[str, Child]] = [
        (
            "Micro-batches",
            f"{count(plan.accumulation_steps)}, of at most {plural(plan.micro_batch, 'sample')}",
        ),
        ("Ranks", count(plan.world_size)),
        ("Precision", plan.precision),
        ("Learning rate", rate_in_words(plan)),
        ("Tuned for a batch of", None if plan.base_batch is None else count(plan.base_batch)),
        ("End of an epoch", plan.last_batch),
        ("Chosen besides", chosen),
    ]
    return join(element("p", words), _pictures(plan_figure(plan)), facts(pairs))


def _tuning(data: RunRecord) -> Markup:
    if data.tuning is None:
        return join([])
    if not data.tuning.trials:
        return join(_rates(data.tuning.learning_rate))
    pictures = _pictures(
        trials.trials_figure(data.tuning.history), trials.importance_figure(data.tuning.importance)
    )
    best = ", ".join(f"{name} = {value}" for name, value in data.tuning.best.items())
    pairs: list[tuple[str, Child]] = [("Best", best), ("Study", data.tuning.study)]
    words = element("p", tuning_in_words(data.tuning))
    return join(words, pictures, facts(pairs), _rates(data.tuning.learning_rate))


def _rates(found: LrTuning | None) -> list[Markup]:
    if found is None:
        return []
    return [
        element("p", rates_in_words(found)),
        *_pictures(rates_figure(found)),
        *([table(pairs_table(found))] if found.pairs else []),
        facts([("Study of the learning rate", found.study)]),
        *filter(None, [_notes(found.notes)]),
    ]


def _training(data: RunRecord) -> Markup:
    training = data.training
    pictures = _pictures(curves.training_figure(data.metrics, data.checkpoints))
    if training is None:
        return join(pictures)
    ended = None if training.micro_batch is None else count(training.micro_batch)
    pairs: list[tuple[str, Child]] = [
        ("Optimizer steps", count(training.optimizer_steps)),
        ("Loss", f"{decimal(training.first_loss)} at first, {decimal(training.final_loss)} at the end"),
        *(
            (f"Validation {name}", "not finite" if value is None else decimal(value))
            for name, value in training.validation.items()
        ),
        (
            "Averaged weights",
            None if training.ema is None else f"of decay {training.ema:g}, exported besides",
        ),
        ("Gradient noise scale", training.noise_advice),
        ("Micro-batch at the end", ended),
        ("Resumed from", training.resumed_from),
        ("Checkpoint", training.checkpoint),
    ]
    return join(element("p", training_in_words(training)), pictures, facts(pairs))


def _repeat(data: RunRecord) -> Markup:
    return join(
        _command(data.command) if data.command else None,
        facts(sorted(data.versions.items())) if data.versions else None,
        _notes(data.notes),
    )


def _command(text: str) -> Markup:
    """Show a command so that lines break between its words only: ``--`` alone at an end misleads."""
    words = [join(" " if at else "", element("span", word)) for at, word in enumerate(text.split(" "))]
    return element("pre", element("code", words))


def tiles(data: RunRecord) -> Markup:
    """Build the few figures that matter most."""
    made = [
        element("div", element("dt", name), element("dd", value, element("small", below) if below else None))
        for name, value, below in _tiles(data)
    ]
    return element("dl", made, class_="tiles")


def _tiles(data: RunRecord) -> Iterator[tuple[str, str, str]]:
    if data.plan is not None:
        steps = plural(data.plan.accumulation_steps, "accumulation step")
        yield "Batch", count(data.plan.effective_batch), f"exactly, in {steps}"
        limit = ""
        if data.probe is not None:
            known = "largest that fits" if data.probe.stopped_by is None else "known to fit"
            limit = f"{known}: {count(data.probe.micro_batch)}"
        yield "Micro-batch", count(data.plan.micro_batch), limit
    elif data.probe is not None:
        yield (
            "Micro-batch",
            count(data.probe.micro_batch),
            f"limited by {data.probe.limited_by.replace('_', ' ')}",
        )
    attempts = data.probe.attempts if data.probe is not None else []
    peaks = [peak for attempt in attempts if attempt.fits and (peak := held_bytes(attempt)) is not None]
    if peaks:
        yield "Peak memory", format_bytes(max(peaks)), f"of {format_bytes(data.device.budget_bytes)}"
    else:
        yield "Budget", format_bytes(data.device.budget_bytes), data.device.name
    if data.training is not None and data.training.samples_per_s is not None:
        yield "Throughput", decimal(data.training.samples_per_s), "samples/s"
    elif data.tuning is not None and data.tuning.trials:
        yield "Throughput", decimal(data.tuning.best_samples_per_s), "samples/s, measured by the tuner"


def write_report(path: Path, data: RunRecord) -> Path:
    """Write the report of a run as one HTML file, whole or not at all.

    Args:
        path: where the file shall stand; missing directories are made.
        data: what there is to report.

    Returns:
        ``path``.

    Raises:
        OSError: the file cannot be written.
    """
    return write_atomic(path, render(data).encode())


def render(data: RunRecord) -> str:
    """Build the page; the same data give the same text."""
    parts = sections(data)
    body = element(
        "body",
        element("a", "Skip to the report", class_="skip", href="#report"),
        element("header", _title(data), tiles(data), _contents(parts)),
        element("main", [_section(part) for part in parts], id="report"),
    )
    return f'<!doctype html>\n<html lang="en">\n{_head(data)}\n{body}\n</html>\n'


def _head(data: RunRecord) -> Markup:
    sheet = style_sheet() + (resources.files(__package__) / "page.css").read_text(encoding="utf-8")
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="generator", content="autobatch"),
        element("title", f"{data.title or 'autobatch'}: autobatch report"),
        element("style", Markup(sheet)),
    )


def _title(data: RunRecord) -> Markup:
    eyebrow = "autobatch report" + (f", {data.created}" if data.created else "")
    return join(
        element("p", eyebrow, class_="eyebrow"),
        element("h1", data.title or "autobatch"),
        element("p", headline(data), class_="verdict"),
    )


def _contents(parts: list[Section]) -> Markup:
    links = [element("li", element("a", part.title, href=f"#{part.slug}")) for part in parts]
    return element("nav", element("ul", links), aria_label="Parts of the report")


def _section(part: Section) -> Markup:
    heading = f"{part.slug}-heading"
    return element(
        "section", element("h2", part.title, id=heading), part.body, id=part.slug, aria_labelledby=heading
    )
