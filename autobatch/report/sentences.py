"""The sentences of a report: what was found, in plain words."""

from __future__ import annotations

from autobatch.core.records import DeviceRecord, LrTuning, Plan, Probe, RunRecord, Training, Tuning
from autobatch.core.units import format_bytes


def count(number: int) -> str:
    """Write a whole number with its thousands apart."""
    return f"{number:,}"


def decimal(number: float | None, digits: int = 4) -> str:
    """Write a number with a few significant digits; ``None`` as ``unknown``."""
    if number is None:
        return "unknown"
    return f"{number:,.{digits}g}" if abs(number) < 10**digits else f"{number:,.0f}"


def plural(number: int, one: str, more: str | None = None) -> str:
    """Write a number with its noun: ``1 sample``, ``2 samples``."""
    return f"{count(number)} {one if number == 1 else more or one + 's'}"


def headline(data: RunRecord) -> str:
    """Say in one sentence what the run came to."""
    place = f"{format_bytes(data.device.budget_bytes)} on {data.device.name}"
    if data.training is not None and data.plan is not None:
        return _trained(data.training, data.plan, place)
    if data.plan is not None:
        return (
            f"Exactly {plural(data.plan.target_batch, 'sample')} an optimizer step in {place}: "
            f"{split_in_words(data.plan)}."
        )
    if data.probe is not None:
        size = count(data.probe.micro_batch)
        if data.probe.limited_by == "memory" and data.probe.stopped_by is None:
            return f"{size} is the largest micro-batch that fits in {place}."
        return f"A micro-batch of {size} fits in {place}."
    return f"There is a budget of {place}."


def _trained(training: Training, plan: Plan, place: str) -> str:
    steps = plural(training.optimizer_steps, "optimizer step")
    words = f"{steps} of exactly {plural(plan.target_batch, 'sample')} in {place}"
    if training.first_loss is None or training.final_loss is None:
        return f"{words}."
    return f"{words}; the loss went from {decimal(training.first_loss)} to {decimal(training.final_loss)}."


def split_in_words(plan: Plan) -> str:
    """Say the split of one rank: ``4 micro-batches of 86 and 8 of 85``."""
    sizes = {size: plan.micro_batches.count(size) for size in sorted(set(plan.micro_batches), reverse=True)}
    (first, times), *rest = sizes.items() or [(plan.micro_batch, plan.accumulation_steps)]
    words = f"{plural(times, 'micro-batch', 'micro-batches')} of {count(first)}"
    words += "".join(f" and {count(times)} of {count(size)}" for size, times in rest)
    if plan.world_size == 1:
        return words
    less = ", or one sample less" if plan.target_batch % plan.world_size else ""
    return f"{words} on each of {count(plan.world_size)} ranks{less}"


def fits_in_words(probe: Probe) -> str:
    """Say how the limit is known."""
    size = count(probe.micro_batch)
    saved = f", a {probe.source} answer that was confirmed" if probe.source.startswith("saved") else ""
    attempts = plural(len(probe.attempts), "size was", "sizes were")
    ooms = f"{count(probe.oom_count)} of them ran" if probe.oom_count else "none ran"
    return f"{size} ran and fits{saved}; {_above(probe)}. {attempts} run, {ooms} out of memory."


def _above(probe: Probe) -> str:
    """Say what is known of the next size."""
    above = count(probe.micro_batch + 1)
    if probe.upper_bound_by == "run":
        return f"{above} was run and did not fit"
    if probe.upper_bound_by == "replay":
        return f"{above} does not fit by the replay of the measured footprint"
    if probe.upper_bound_by == "cap":
        cap = _CAPS.get(probe.limited_by, "the cap")
        return f"{above} was not tried, for {count(probe.micro_batch)} is {cap}"
    return f"whether {above} fits is not known: stopped by {probe.stopped_by or 'request'}"


_CAPS = {
    "target_batch": "the target batch",
    "dataset": "the whole dataset",
    "max_micro_batch": "the largest that was allowed",
}


def budget_in_words(device: DeviceRecord) -> str:
    """Say what there is to spend and why."""
    return (
        f"{format_bytes(device.budget_bytes)} of {format_bytes(device.total_bytes)} may be held: "
        f"{device.budget_source.rstrip('.')}."
    )


def rate_in_words(plan: Plan) -> str:
    """Say the learning rate, its rule, factor and source."""
    source = f" ({plan.learning_rate_source})" if plan.learning_rate_source else ""
    if plan.learning_rate_rule == "none":
        return f"{decimal(plan.learning_rate)}, as declared{source}"
    if plan.learning_rate_rule == "tuned":
        return f"{decimal(plan.learning_rate)}, times {decimal(plan.learning_rate_factor)}{source}"
    return (
        f"{decimal(plan.learning_rate)}: the {plan.learning_rate_rule} rule, "
        f"times {decimal(plan.learning_rate_factor)}{source}"
    )


def tuning_in_words(tuning: Tuning) -> str:
    """Say what tuning gained."""
    if not tuning.best_samples_per_s:
        return f"The defaults stay: they were not measured, after {plural(tuning.trials, 'trial')}."
    gain = (
        tuning.best_samples_per_s / tuning.baseline_samples_per_s - 1 if tuning.baseline_samples_per_s else 0
    )
    word = "no faster than" if gain <= 0 else f"{gain:.0%} faster than"
    return (
        f"{decimal(tuning.best_samples_per_s)} samples/s, {word} the defaults' "
        f"{decimal(tuning.baseline_samples_per_s)}, after {plural(tuning.trials, 'trial')}."
    )


def rates_in_words(found: LrTuning) -> str:
    """Say what was found of the learning rate."""
    tried = f"{plural(found.trials, 'learning rate was', 'learning rates were')} tried in runs of "
    tried += f"{plural(found.steps, 'optimizer step')} from the same weights."
    if found.best == found.default:
        return f"The learning rate stays {decimal(found.default)}. {tried}"
    gain = sum(pair.gain for pair in found.pairs) / max(1, len(found.pairs))
    return (
        f"{decimal(found.best)} in the place of {decimal(found.default)}: {gain:.0%} of the fall of the loss "
        f"gained, on average over {plural(len(found.pairs), 'draw')} of the data. {tried}"
    )


def training_in_words(training: Training) -> str:
    """Say what the training loop did."""
    recoveries = plural(training.oom_recoveries, "recovery", "recoveries")
    rate = "" if training.samples_per_s is None else f", {decimal(training.samples_per_s)} samples/s"
    words = (
        f"{plural(training.samples, 'sample')} in {decimal(training.seconds, 3)} s{rate}; "
        f"{recoveries} from running out of memory."
    )
    if training.skipped_steps:
        words += f" {plural(training.skipped_steps, 'window was', 'windows were')} skipped."
    if training.failed_checkpoints:
        failed = plural(len(training.failed_checkpoints), "checkpoint")
        words += f" {failed} on the way could not be written."
    if training.ema is not None and training.validation:
        words += f" Held-out figures are of the averaged weights (decay {training.ema:g})."
    return words
