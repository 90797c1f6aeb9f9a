"""The few figures of a run that matter most, for the head of the page."""

from __future__ import annotations

from collections.abc import Iterator

from autobatch.report.data import ReportData
from autobatch.report.figures import held_bytes
from autobatch.report.markup import Markup, element
from autobatch.report.verdict import count, decimal, many
from autobatch.units import format_bytes


def tiles(data: ReportData) -> Markup:
    """Build the few figures that matter most."""
    made = [
        element("div", element("dt", name), element("dd", value, element("small", below) if below else None))
        for name, value, below in _tiles(data)
    ]
    return element("dl", made, class_="tiles")


def _tiles(data: ReportData) -> Iterator[tuple[str, str, str]]:
    if data.plan is not None:
        steps = many(data.plan.accumulation_steps, "accumulation step")
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
