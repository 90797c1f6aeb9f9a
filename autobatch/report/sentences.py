"""The sentences of a report: the results of a run in plain words."""

from __future__ import annotations

from autobatch.core.records import DeviceRecord, LrTuning, Plan, Probe, RunRecord, Training, Tuning
from autobatch.core.units import format_bytes


def count(number: int) -> str:
    """Write a whole number with thousands separators."""
    return f"{number:,}"


def decimal(number: float | None, digits: int = 4) -> str:
    """Write a number with a few significant digits; ``None`` becomes ``unknown``."""
    if number is None:
        return "unknown"
    return f"{number:,.{digits}g}" if abs(number) < 10**digits else f"{number:,.0f}"


def plural(number: int, one: str, more: str | None = None) -> str:
    """Write a number with its noun: ``1 sample``, ``2 samples``."""
    return f"{count(number)} {one if number == 1 else more or one + 's'}"


def headline(data: RunRecord) -> str:
    """Sum up the run."""
    place = f"{format_bytes(data.device.budget_bytes)} on {data.device.name}"
    if data.training is not None and data.plan is not None:
        return _trained(data.training, data.plan, place)
    if data.plan is not None:
        return (
            f"Each optimizer step takes exactly {plural(data.plan.target_batch, 'sample')} in {place}: "
            f"{split_in_words(data.plan)}."
        )
    if data.probe is not None:
        size = count(data.probe.micro_batch)
        if data.probe.limited_by == "memory" and data.probe.stopped_by is None:
            return f"{size} is the largest micro-batch that fits in {place}."
        return f"A micro-batch of {size} fits in {place}."
    return f"The memory budget is {place}."


def _trained(training: Training, plan: Plan, place: str) -> str:
    steps = plural(training.optimizer_steps, "optimizer step")
    words = f"{steps} of exactly {plural(plan.target_batch, 'sample')} in {place}."
    if training.first_loss is None or training.final_loss is None:
        return words
    return f"{words} The loss went from {decimal(training.first_loss)} to {decimal(training.final_loss)}."


def split_in_words(plan: Plan) -> str:
    """Describe the split of one rank: ``4 micro-batches of 86 and 8 of 85``."""
    sizes = {size: plan.micro_batches.count(size) for size in sorted(set(plan.micro_batches), reverse=True)}
    (first, times), *rest = sizes.items() or [(plan.micro_batch, plan.accumulation_steps)]
    words = f"{plural(times, 'micro-batch', 'micro-batches')} of {count(first)}"
    words += "".join(f" and {count(times)} of {count(size)}" for size, times in rest)
    if plan.world_size == 1:
        return words
    less = ", or one sample less" if plan.target_batch % plan.world_size else ""
    return f"{words} on each of {count(plan.world_size)} ranks{less}"


def fits_in_words(probe: Probe) -> str:
    """Describe the largest micro-batch and the evidence for it."""
    saved = f" This run confirmed a limit {probe.source}." if probe.source.startswith("saved") else ""
    ran = plural(len(probe.attempts), "size")
    ooms = plural(probe.oom_count, "out-of-memory error") if probe.oom_count else "no out-of-memory error"
    return (
        f"A micro-batch of {count(probe.micro_batch)} ran and fits.{saved} {_next_size(probe)} "
        f"The probe ran {ran} with {ooms}."
    )


def _next_size(probe: Probe) -> str:
    """Describe what is known about the next larger micro-batch."""
    above = count(probe.micro_batch + 1)
    if probe.upper_bound_by == "run":
        return f"{above} ran and did not fit."
    if probe.upper_bound_by == "replay":
        return f"A replay of the measured footprint shows that {above} does not fit."
    if probe.upper_bound_by == "cap":
        cap = _CAPS.get(probe.limited_by, "the cap")
        return f"{above} was not tried, because {count(probe.micro_batch)} is {cap}."
    if probe.stopped_by is None:
        return "No larger size was tried, because only this one was requested."
    return f"It is unknown whether {above} fits, because the search was stopped ({probe.stopped_by})."


_CAPS = {
    "target_batch": "the target batch",
    "dataset": "the whole dataset",
    "max_micro_batch": "the largest size allowed",
}


def budget_in_words(device: DeviceRecord) -> str:
    """Describe the memory budget and its source."""
    return (
        f"The memory budget is {format_bytes(device.budget_bytes)} of {format_bytes(device.total_bytes)}: "
        f"{device.budget_source.rstrip('.')}."
    )


def rate_in_words(plan: Plan) -> str:
    """Describe the learning rate, its rule, factor and source."""
    source = f" ({plan.learning_rate_source})" if plan.learning_rate_source else ""
    rate, factor = decimal(plan.learning_rate), decimal(plan.learning_rate_factor)
    if plan.learning_rate_rule == "none":
        return f"{rate}, as declared{source}"
    if plan.learning_rate_rule == "tuned":
        return f"{rate}, {factor} times the declared rate{source}"
    return f"{rate}, {factor} times the declared rate by the {plan.learning_rate_rule} rule{source}"


def tuning_in_words(tuning: Tuning) -> str:
    """Describe the gain of tuning over the defaults."""
    after = f"After {plural(tuning.trials, 'trial')}"
    if not tuning.best_samples_per_s:
        return f"{after}, the defaults were kept, because their throughput was not measured."
    before = tuning.baseline_samples_per_s
    gain = tuning.best_samples_per_s / before - 1 if before else 0
    if gain <= 0:
        return f"{after}, the defaults were kept. They run {decimal(tuning.best_samples_per_s)} samples/s."
    return (
        f"{after}, the best configuration runs {decimal(tuning.best_samples_per_s)} samples/s, {gain:.0%} "
        f"faster than the defaults at {decimal(before)}."
    )


def rates_in_words(found: LrTuning) -> str:
    """Describe the result of the learning-rate study."""
    tried = (
        f"The study tried {plural(found.trials, 'learning rate')} in runs of "
        f"{plural(found.steps, 'optimizer step')} from the same weights."
    )
    if found.best == found.default:
        return f"Kept learning rate {decimal(found.default)}. {tried}"
    gain = sum(pair.gain for pair in found.pairs) / max(1, len(found.pairs))
    return (
        f"Changed the learning rate from {decimal(found.default)} to {decimal(found.best)}. This gained "
        f"{gain:.0%} of the loss reduction, averaged over {plural(len(found.pairs), 'data order')}. {tried}"
    )


def training_in_words(training: Training) -> str:
    """Describe the training run: samples, time, recoveries, skipped steps and failed checkpoints."""
    recoveries = plural(training.oom_recoveries, "recovery", "recoveries")
    rate = "" if training.samples_per_s is None else f" ({decimal(training.samples_per_s)} samples/s)"
    words = (
        f"Trained on {plural(training.samples, 'sample')} in {decimal(training.seconds, 3)} s{rate} with "
        f"{recoveries} from out of memory."
    )
    if training.skipped_steps:
        words += f" {plural(training.skipped_steps, 'step was', 'steps were')} skipped."
    if training.failed_checkpoints:
        failed = plural(len(training.failed_checkpoints), "periodic checkpoint")
        words += f" {failed} could not be written."
    if training.ema is not None and training.validation:
        words += f" The validation figures are those of the averaged weights (decay {training.ema:g})."
    return words
