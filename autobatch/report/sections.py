"""The sections of the report page.

To add one, write a function that turns a `RunRecord` into `Markup`, and list it in `sections`.
"""

from __future__ import annotations

from typing import NamedTuple

from autobatch.core.records.device import DeviceRecord
from autobatch.core.records.run import RunRecord
from autobatch.core.records.tuning import LrTuning
from autobatch.core.units import format_bytes
from autobatch.report.charts.curves import training_figure
from autobatch.report.charts.drawing import Picture, Table
from autobatch.report.charts.memory import memory_curve_figure, memory_figure
from autobatch.report.charts.rates import pairs_table, rates_figure
from autobatch.report.charts.sizes import lengths_figure, padding_figure
from autobatch.report.charts.split import plan_figure
from autobatch.report.charts.trials import (
    comparison_figure,
    knee_figure,
    trials_figure,
)
from autobatch.report.html import (
    BarPart,
    Child,
    Markup,
    bar,
    element,
    facts,
    figure,
    join,
    prose,
    table,
)
from autobatch.report.repeat import notes, repeat
from autobatch.report.sentences import (
    budget_in_words,
    fits_in_words,
    padding_in_words,
    rate_in_words,
    rates_in_words,
    real_batches_in_words,
    run_order_in_words,
    split_in_words,
    training_in_words,
    tuning_in_words,
)
from autobatch.report.words import count, decimal, knobs_in_words, metric_in_words, plural

PHASES = {
    "forward": "series-1",
    "backward": "series-2",
    "data": "series-3",
    "step": "series-5",
    "checkpoint": "series-6",
    "validation": "series-7",
    "other": "series-4",
}
"""Colours of the phases of a training."""


class Section(NamedTuple):
    """A section of the page."""

    slug: str
    title: str
    body: Markup


def sections(data: RunRecord) -> list[Section]:
    """Build the sections that have data, in reading order."""
    candidates = [
        Section("device", "Device and budget", _device(data.device)),
        Section("memory", "What fits", _memory(data)),
        Section("plan", "Plan", _plan(data)),
        Section("tuning", "Tuning", _tuning(data)),
        Section("training", "Training", _training(data)),
        Section("repeat", "Repeat this run", repeat(data)),
    ]
    return [section for section in candidates if section.body]


def _pictures(*pictures: Picture | None) -> list[Markup]:
    return [figure(picture) for picture in pictures if picture is not None]


def _device(device: DeviceRecord) -> Markup:
    holders = [
        [one.name or "unknown", "" if one.pid is None else str(one.pid), format_bytes(one.used_bytes)]
        for one in device.holders
    ]
    held = Table(caption="Processes that hold memory", head=["Process", "PID", "Memory"], rows=holders)
    return join(
        element("p", prose(budget_in_words(device))),
        _bar(device),
        facts(
            [
                ("Device", f"{device.name} ({device.kind})"),
                ("Total memory", format_bytes(device.total_bytes)),
                ("Other processes", format_bytes(device.other_processes_bytes)),
            ]
        ),
        notes(device.notes),
        table(held) if holders else None,
    )


def _bar(device: DeviceRecord) -> Markup:
    """Draw the memory of the device as one bar: the budget, other processes, and the rest."""
    others = device.other_processes_bytes or 0
    rest = max(device.total_bytes - device.budget_bytes - others, 0)
    parts = [("budget", "accent", device.budget_bytes), ("other processes", "series-3", others)]
    return bar(
        "Device memory",
        [
            BarPart(f"{name} {format_bytes(size)}", role, size)
            for name, role, size in [*parts, ("remaining", "rule", rest)]
        ],
    )


def _times(phase_seconds: dict[str, float]) -> Markup | None:
    """Draw where the time of the training went."""
    whole = sum(phase_seconds.values())
    if not whole:
        return None
    parts = [
        BarPart(f"{name} {100 * seconds / whole:.0f} %", PHASES.get(name, "rule"), round(seconds / whole, 4))
        for name, seconds in phase_seconds.items()
    ]
    return join(element("h3", "Where the time went"), bar("Time of the training", parts))


def _memory(data: RunRecord) -> Markup:
    probe = data.probe
    curve = memory_curve_figure(data.memory_curve) if data.memory_curve else None
    if probe is None:
        return join(_pictures(curve))
    pictures = _pictures(memory_figure(data.device, probe, data.predicted), curve)
    predicted = None if probe.predicted_micro_batch is None else count(probe.predicted_micro_batch)
    pairs: list[tuple[str, Child]] = [
        ("Largest micro-batch", plural(probe.micro_batch, "sample")),
        ("Precision of these runs", probe.precision),
        ("Limited by", probe.limited_by.replace("_", " ")),
        ("Predicted micro-batch", predicted),
    ]
    checked = real_batches_in_words(probe)
    words = element("p", join(fits_in_words(probe), "" if checked is None else f" {checked}"))
    return join(words, pictures, _pictures(lengths_figure(probe.lengths, probe.size_unit)), facts(pairs))


def _plan(data: RunRecord) -> Markup:
    plan = data.plan
    if plan is None:
        return Markup()
    chosen = knobs_in_words(plan.knobs)
    words = (
        f"Each optimizer step takes exactly {plural(plan.target_batch, 'sample')}: {split_in_words(plan)}."
    )
    steps, size = count(plan.accumulation_steps), plural(plan.micro_batch, "sample")
    pairs: list[tuple[str, Child]] = [
        ("Micro-batches", f"{steps}, of at most {size}"),
        ("Ranks", count(plan.world_size)),
        ("Precision", plan.precision),
        ("Learning rate", rate_in_words(plan)),
        ("Base batch", None if plan.base_batch is None else plural(plan.base_batch, "sample")),
        ("Last batch of an epoch", plan.last_batch),
        ("Tuned knobs", chosen),
    ]
    if plan.size_cut is None:
        words = f"{words} {run_order_in_words(plan)}".rstrip()
        return join(element("p", words), _pictures(plan_figure(plan)), facts(pairs))
    saved = element("p", padding_in_words(plan.size_cut))
    return join(element("p", words), saved, _pictures(padding_figure(plan.size_cut)), facts(pairs))


def _tuning(data: RunRecord) -> Markup:
    if data.tuning is None:
        return join([])
    if not data.tuning.trials:
        return join(_rates(data.tuning.learning_rate))
    history = data.tuning.history
    pictures = _pictures(
        comparison_figure(data.tuning.comparisons), knee_figure(history), trials_figure(history)
    )
    best = knobs_in_words(data.tuning.best)
    pairs: list[tuple[str, Child]] = [("Configuration", best), ("Study", data.tuning.study)]
    words = element("p", tuning_in_words(data.tuning, data.plan))
    return join(words, pictures, facts(pairs), _rates(data.tuning.learning_rate))


def _rates(found: LrTuning | None) -> list[Markup]:
    if found is None:
        return []
    return [
        element("h3", "Learning rate"),
        element("p", rates_in_words(found)),
        *_pictures(rates_figure(found)),
        *([table(pairs_table(found))] if found.pairs else []),
        facts([("Learning-rate study", found.study)]),
        *filter(None, [notes(found.notes)]),
    ]


def _training(data: RunRecord) -> Markup:
    training = data.training
    pictures = _pictures(training_figure(data.metrics, data.checkpoints))
    if training is None:
        return join(pictures)
    last_size = None if training.micro_batch is None else plural(training.micro_batch, "sample")
    averaged = None if training.ema is None else f"decay {training.ema:g}, exported to model-ema.safetensors"
    pairs: list[tuple[str, Child]] = [
        ("Optimizer steps", count(training.optimizer_steps)),
        (
            "Training loss",
            f"{decimal(training.first_loss)} at the start, {decimal(training.final_loss)} at the end",
        ),
        *(
            (f"Held-out {name}", metric_in_words(name, value).removeprefix(f"{name} "))
            for name, value in training.validation.items()
        ),
        ("Averaged weights", averaged),
        ("Gradient noise scale", training.noise_advice),
        ("Final micro-batch", last_size),
        ("Resumed from", training.resumed_from),
        ("Checkpoint", training.checkpoint),
    ]
    times = _times(training.phase_seconds)
    words = element("p", training_in_words(training))
    return join(words, pictures, times, facts(pairs), notes(training.notes))
