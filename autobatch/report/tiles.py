"""The few figures that matter most, as tiles below the headline of the report."""

from __future__ import annotations

from collections.abc import Iterator

from autobatch.core.records.plan import Plan
from autobatch.core.records.probe import Probe
from autobatch.core.records.run import RunRecord
from autobatch.core.units import format_bytes
from autobatch.report.charts.memory import held_bytes
from autobatch.report.html import Markup, element
from autobatch.report.sentences import is_probed_configuration, when_measured
from autobatch.report.words import count, decimal, knobs_in_words, plural


def tiles(data: RunRecord) -> Markup:
    """Build the few figures that matter most, as tiles below the headline."""
    made = [
        element("div", element("dt", name), element("dd", value, element("small", below) if below else None))
        for name, value, below in _tiles(data)
    ]
    return element("dl", made, class_="tiles")


def _tiles(data: RunRecord) -> Iterator[tuple[str, str, str]]:
    if data.plan is not None:
        steps = plural(data.plan.accumulation_steps, "accumulation step")
        yield "Target batch", count(data.plan.effective_batch), f"exactly, in {steps}"
        yield "Micro-batch", count(data.plan.micro_batch), _limit_words(data.probe, data.plan)
    elif data.probe is not None:
        yield (
            "Micro-batch",
            count(data.probe.micro_batch),
            f"limited by {data.probe.limited_by.replace('_', ' ')}",
        )
    yield _memory_tile(data)
    if data.training is not None and data.training.samples_per_s is not None:
        yield "Throughput", decimal(data.training.samples_per_s), "samples/s"
    elif data.tuning is not None and data.tuning.trials:
        when = when_measured(data.tuning)
        yield "Throughput", decimal(data.tuning.best_samples_per_s), f"samples/s, measured while tuning{when}"


def _limit_words(probe: Probe | None, plan: Plan) -> str:
    """Return the limit of the plan's configuration; the limit of another one says nothing about it."""
    if probe is None or not is_probed_configuration(probe, plan):
        return ", ".join(filter(None, (plan.precision, knobs_in_words(plan.knobs))))
    if plan.run_order is not None:
        return f"as many fit in the order of this run, {plan.precision}"
    known = "up to {} fit" if probe.stopped_by is None else "{} are known to fit"
    return f"{known.format(count(probe.micro_batch))}, {plan.precision}"


def _memory_tile(data: RunRecord) -> tuple[str, str, str]:
    """Return the peak of the training, else that of the probe, which may be of another configuration."""
    budget = format_bytes(data.device.budget_bytes)
    training = data.training
    if training is not None:
        peak = training.peak_reserved_bytes or training.peak_allocated_bytes
        if peak is not None:
            return "Peak memory", format_bytes(peak), f"of {budget}, while training"
    ran = [one for one in (data.probe.attempts if data.probe else []) if one.fits and held_bytes(one)]
    if not ran:
        return "Budget", budget, data.device.name
    largest = max(ran, key=lambda one: held_bytes(one) or 0)
    precision = data.probe.precision if data.probe else None
    what = ", ".join(filter(None, (f"{count(largest.micro_batch)} samples", precision)))
    return "Peak in the probe", format_bytes(held_bytes(largest)), f"of {budget}, {what}"
