"""The sentences of a report: the results of a run in plain words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from autobatch.core.records.device import DeviceRecord
from autobatch.core.records.plan import Plan, SizeCut
from autobatch.core.records.probe import Probe
from autobatch.core.records.run import RunRecord
from autobatch.core.records.training import Training
from autobatch.core.records.tuning import LrTuning, Tuning
from autobatch.core.units import format_bytes
from autobatch.report.words import count, decimal, metric_in_words, percent, plural, ratio_in_words


def is_probed_configuration(probe: Probe, plan: Plan) -> bool:
    """Return whether the limit of a probe is that of the plan's configuration."""
    return not plan.knobs and probe.precision in (None, plan.precision)


def steps_to_pay_back(tuning: Tuning, target_batch: int) -> int | None:
    """Return the optimizer steps after which a search has saved the time that it took.

    Returns:
        None if it gained nothing.
    """
    before, after = tuning.baseline_samples_per_s, tuning.best_samples_per_s
    if not before or after <= before:
        return None
    saved_s = target_batch / before - target_batch / after
    return math.ceil(tuning.seconds / saved_s)


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
    if training.validation:
        figures = sorted(training.validation.items(), key=lambda item: item[0] == "loss")
        return f"{words} Held-out {', '.join(metric_in_words(*item) for item in figures)}."
    if training.first_loss is None or training.final_loss is None:
        return words
    first, final = decimal(training.first_loss), decimal(training.final_loss)
    return f"{words} The training loss went from {first} to {final}."


def split_in_words(plan: Plan) -> str:
    """Describe the split of one rank: ``4 micro-batches of 86 and 8 of 85``."""
    cut = plan.size_cut
    ranks = f" on each of {count(plan.world_size)} ranks" if plan.world_size > 1 else ""
    if cut is not None and cut.steps is not None:
        return f"about {cut.steps:.1f} micro-batches, cut at the sizes of their samples,{ranks}".removesuffix(
            ","
        )
    unlike = by_kind(plan)
    if len(unlike) > 1:
        return ", ".join(f"{_sizes_in_words(own)} on {plural(times, 'rank')}" for own, times in unlike)
    less = ", or one sample less" if ranks and plan.target_batch % plan.world_size else ""
    return (
        f"{_sizes_in_words(plan.micro_batches or [plan.micro_batch] * plan.accumulation_steps)}{ranks}{less}"
    )


def by_kind(plan: Plan) -> list[tuple[list[int], int]]:
    """Return the micro-batches of the first rank of each kind of device, and the number of its ranks."""
    counts = Counter(one.kind for one in plan.ranks)
    first = {one.kind: one.micro_batches for one in reversed(plan.ranks)}
    return [(first[kind], counts[kind]) for kind in sorted(first)]


def _sizes_in_words(sizes: Sequence[int]) -> str:
    if not sizes:
        return "no micro-batch"
    (first, times), *rest = sorted(Counter(sizes).items(), reverse=True)
    words = f"{plural(times, 'micro-batch', 'micro-batches')} of {count(first)}"
    return words + "".join(f" and {count(times)} of {count(size)}" for size, times in rest)


def padding_in_words(cut: SizeCut) -> str:
    """Describe what a split by size saves."""
    if cut.padding is None or cut.padding_by_count is None:
        return "Each batch is sorted by the sizes of its samples and cut where little is padding."
    faster = ""
    if cut.expected_speedup is not None:
        share = f"1 ÷ {cut.expected_speedup:.2f}"
        faster = f" By the measured cost of micro-batches, a step takes {share} of the time."
    checked = ""
    if cut.replayed_batches is not None:
        checked = f" A replay of {plural(cut.replayed_batches, 'batch', 'batches')} of the run fits."
    return (
        "Each batch is sorted by the sizes of its samples and cut where the cost is least. Its gradient "
        f"stays the same. For each token or element of a sample, {cut.padding:.2f} are computed with the "
        f"padding, and {cut.padding_by_count:.2f} if batches were split by count.{faster}{checked}"
    )


def run_order_in_words(plan: Plan) -> str:
    """Describe the order that a micro-batch fits in; nothing if it fits in any order."""
    found = plan.run_order
    if found is None:
        return ""
    return (
        f"A micro-batch of {count(plan.micro_batch)} fits in the order of this run: all of its "
        f"{plural(found.batches, 'batch', 'batches')} are known, and the heaviest ones ran. For any order, "
        f"the plan would have {count(found.micro_batch_in_any_order)}."
    )


def real_batches_in_words(probe: Probe) -> str | None:
    """Describe the check of a limit against real batches; None if there was none."""
    found = probe.real_batches
    if found is None:
        return None
    how = "replayed in a model of the allocator" if found.by == "replay" else "run"
    words = f"Samples differ in size, so {plural(found.batches, 'batch', 'batches')} of the run were {how}."
    if found.micro_batch_alone > probe.micro_batch:
        words += (
            f" They fit at a micro-batch of {count(probe.micro_batch)}. Of the most expensive samples alone, "
            f"{count(found.micro_batch_alone)} fit, but many sizes fragment the memory."
        )
    return words


def fits_in_words(probe: Probe) -> str:
    """Describe the largest micro-batch and the evidence for it."""
    date = probe.source.removeprefix("saved ")
    saved = f" One run confirmed the limit saved on {date}." if date != probe.source else ""
    in_precision = "" if probe.precision is None else f" in {probe.precision}"
    ran = plural(len(probe.attempts), "size")
    ooms = plural(probe.oom_count, "out-of-memory error") if probe.oom_count else "no out-of-memory error"
    return (
        f"A micro-batch of {count(probe.micro_batch)} ran{in_precision} and fits.{saved} {_next_size(probe)} "
        f"The probe ran {ran} with {ooms}."
    )


def _next_size(probe: Probe) -> str:
    """Describe what is known about the next larger micro-batch."""
    above = count(probe.micro_batch + 1)
    if probe.upper_bound_by == "run":
        return f"{above} ran and did not fit."
    if probe.upper_bound_by == "error":
        return f"{above} did not run, for another reason than memory."
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
        f"The memory budget is {format_bytes(device.budget_bytes)} of {format_bytes(device.total_bytes)} "
        f"({device.budget_source.rstrip('.')})."
    )


def rate_in_words(plan: Plan) -> str:
    """Describe the learning rate, its rule, factor and source."""
    rate, factor = decimal(plan.learning_rate), decimal(plan.learning_rate_factor)
    if plan.learning_rate_rule == "none":
        return f"{rate}, {plan.learning_rate_source or 'as declared'}"
    source = f" ({plan.learning_rate_source})" if plan.learning_rate_source else ""
    if plan.learning_rate_rule == "tuned":
        return f"{rate}, {factor} times the declared rate{source}"
    return f"{rate}, {factor} times the declared rate by the {plan.learning_rate_rule} rule{source}"


def when_measured(tuning: Tuning) -> str:
    """Return the time at which an earlier search measured the speeds, in brackets; empty if this one did."""
    if tuning.measured is None:
        return ""
    return f" (measured on {tuning.measured[:16].replace('T', ' ')} UTC)"


def tuning_in_words(tuning: Tuning, plan: Plan | None = None) -> str:
    """Describe the gain of tuning over the defaults, and when a plan has paid for the search."""
    after = f"After {plural(tuning.trials, 'trial')}"
    if not tuning.best_samples_per_s:
        return f"{after}, the defaults were kept, because their throughput was not measured."
    before = tuning.baseline_samples_per_s
    if not before or tuning.best_samples_per_s <= before:
        speed = f"{decimal(tuning.best_samples_per_s)} samples/s{when_measured(tuning)}"
        return f"{after}, the defaults were kept. They run {speed}."
    words = (
        f"{after}, the best configuration runs {decimal(tuning.best_samples_per_s)} samples/s, "
        f"{ratio_in_words(tuning.best_samples_per_s / before)} than the defaults at {decimal(before)}."
    )
    needed = None if plan is None else steps_to_pay_back(tuning, plan.target_batch)
    if needed is None:
        return words
    return f"{words} The search took {decimal(tuning.seconds, 3)} s, which {plural(needed, 'step')} pay back."


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
        f"{percent(gain)} of the loss reduction, averaged over {plural(len(found.pairs), 'data order')}. "
        f"{tried}"
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
        words += f" The held-out figures are those of the averaged weights (decay {training.ema:g})."
    return words
