"""Short lines on a result: what a terminal prints at its end, and ``str()`` of what a call returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from autobatch.core.units import format_bytes
from autobatch.report.sentences import by_kind, is_probed_configuration, steps_to_pay_back, when_measured
from autobatch.report.words import count, knobs_in_words, metric_in_words, percent, plural, ratio_in_words

if TYPE_CHECKING:
    from pathlib import Path

    from autobatch.core.records.device import DeviceRecord
    from autobatch.core.records.estimate import Estimate
    from autobatch.core.records.plan import Plan
    from autobatch.core.records.probe import Probe
    from autobatch.core.records.run import RunRecord
    from autobatch.core.records.training import Training
    from autobatch.core.records.tuning import LrTuning, Trial, Tuning

CAPS = {
    "target_batch": "that is the whole target batch",
    "dataset": "those are all samples of the data",
    "max_micro_batch": "more is not allowed by --max-micro-batch",
    "memory": "memory limits it",
}
"""Reasons why a micro-batch is not larger, in words."""


class Line(NamedTuple):
    """A line of a summary."""

    label: str
    text: str
    kind: Literal["main", "detail", "path"] = "detail"
    """``main`` for the few lines that answer the question, ``path`` for a file or folder."""


def describe_limit(probe: Probe, place: str = "") -> str:
    """Describe how many samples fit, on each rank if there are several, and the evidence.

    Args:
        probe: the probe.
        place: the memory that they fit in, for example ``" in 6.00 GiB"``.
    """
    verb = "fits" if probe.micro_batch == 1 else "fit"
    samples = plural(probe.micro_batch, "sample")
    if probe.ranks:
        return f"{samples} {verb} at a time{_on_ranks(probe)}{place}"
    if probe.source.startswith("saved "):
        when = probe.source.removeprefix("saved ")
        return f"{samples} still {verb} at a time{place} (saved on {when}, confirmed by one run)"
    return f"{samples} {verb} at a time{place}{_evidence(probe)}"


def _evidence(probe: Probe) -> str:
    """Return why no more samples fit; empty if only this size was asked for."""
    if probe.source == "asked":
        return ""
    more = count(probe.micro_batch + 1)
    return {
        "run": f"; {more} ran and do not",
        "error": f"; {more} do not run, for another reason than memory",
        "replay": f"; {more} do not (predicted from {plural(len(probe.attempts), 'test run')})",
        "cap": f"; {CAPS[probe.limited_by]}",
        None: f"; more may: the {probe.stopped_by} ended the search",
    }[probe.upper_bound_by]


def _on_ranks(probe: Probe) -> str:
    """Return the ranks that the limit holds on; empty for one process."""
    limits = [one.limit for one in probe.ranks]
    if not limits:
        return ""
    shared = ", which share the model" if probe.parallel == "shard" else ""
    if len(set(limits)) == 1:
        return f" on each of {count(len(limits))} ranks{shared}"
    return f" on rank 0, and {_listed(limits[1:])} on others{shared}"


def _listed(limits: Sequence[int]) -> str:
    return ", ".join(map(count, sorted(set(limits), reverse=True)))


def describe_plan(plan: Plan) -> str:
    """Describe the split: ``batch 1,024 in 12 micro-batches (4 × 86, 8 × 85) · bf16 · lr 0.0003``."""
    words = [f"batch {count(plan.target_batch)} in {describe_split(plan)}", plan.precision]
    if plan.knobs:
        words.append(knobs_in_words(plan.knobs))
    rate = f"lr {plan.learning_rate:.3g}"
    if plan.learning_rate_rule == "tuned":
        rate += f" (tuned, × {plan.learning_rate_factor:.3g})"
    elif plan.learning_rate_rule != "none":
        rate += f" ({plan.learning_rate_rule} rule, × {plan.learning_rate_factor:.3g})"
    return " · ".join([*words, rate])


def describe_split(plan: Plan) -> str:
    """Describe the micro-batches of one rank: ``12 micro-batches (4 × 86, 8 × 85)``."""
    together = ", which share the model" if plan.parallel == "shard" else ""
    ranks = f" on each of {count(plan.world_size)} ranks{together}" if plan.world_size > 1 else ""
    if plan.size_cut is not None and plan.size_cut.steps is not None:
        words = f"about {plan.size_cut.steps:.1f} micro-batches, cut by size"
        return f"{words},{ranks}" if ranks else words
    sizes = plan.micro_batches or [plan.micro_batch] * plan.accumulation_steps
    unlike = by_kind(plan)
    if len(unlike) < 2:
        return f"{_sizes_in_words(sizes)}{ranks}"
    return ", ".join(f"{_sizes_in_words(own)} on {plural(times, 'rank')}" for own, times in unlike) + together


def _sizes_in_words(sizes: Sequence[int]) -> str:
    kinds = sorted(set(sizes), reverse=True)
    words = plural(len(sizes), "micro-batch", "micro-batches")
    if len(kinds) == 1:
        return f"{words} of {count(kinds[0])}"
    parts = ", ".join(f"{count(sizes.count(size))} × {count(size)}" for size in kinds)
    return f"{words} ({parts})" if kinds else words


def describe_trial(trial: Trial, changes: Mapping[str, object]) -> str:
    """Describe a trial: ``bf16, channels-last: 24,372 samples/s (29 % faster)``."""
    what = knobs_in_words(changes) or "default"
    if not trial.feasible or trial.samples_per_s is None:
        return f"{what}: left out, {trial.note}"
    speed = f"{trial.samples_per_s:,.0f} samples/s"
    if changes and trial.relative is not None:
        speed += f" ({ratio_in_words(trial.relative)})"
    return f"{what}: {speed}"


def describe_tuning(tuning: Tuning, plan: Plan | None = None, steps: int | None = None) -> str:
    """Describe the gain over the default configuration, and when it has paid for the search.

    Args:
        tuning: the search.
        plan: its plan; None leaves out the pay-back.
        steps: optimizer steps of the run; None if unknown.
    """
    best, default = tuning.best_samples_per_s, tuning.baseline_samples_per_s
    if not best:
        return "kept the default: it could not be measured"
    if best <= default or not default:
        return f"kept the default, {best:,.0f} samples/s{when_measured(tuning)}"
    words = f"{best:,.0f} samples/s: {ratio_in_words(best / default)} than the default ({default:,.0f})"
    chosen = next((one for one in tuning.comparisons if one.chosen), None)
    if chosen is not None and chosen.low is not None and chosen.high is not None:
        words += f", 95 % interval {percent(chosen.low - 1)} to {percent(chosen.high - 1)}"
    needed = None if plan is None else steps_to_pay_back(tuning, plan.target_batch)
    if needed is None:
        return words
    this = "" if steps is None else f"; this run has {count(steps)}"
    return f"{words}; pays back after {plural(needed, 'step')}{this}"


def describe_rate(found: LrTuning) -> str:
    """Describe the choice of the learning rate."""
    tried = f"{plural(found.trials, 'learning rate')} tried in runs of {plural(found.steps, 'step')}"
    if found.best == found.default:
        return f"kept {found.default:.3g}: {tried}"
    best, default = (
        "no loss" if loss is None else f"loss {loss:.4g}" for loss in (found.best_loss, found.default_loss)
    )
    return f"{found.best:.3g} ({best}) instead of {found.default:.3g} ({default}): {tried}"


def describe_reached(training: Training) -> str:
    """Describe what the training reached: the held-out figures, else the loss."""
    if not training.validation:
        return f"training {_loss(training)}"
    figures = sorted(training.validation.items(), key=lambda item: item[0] == "loss")
    whose = " of the averaged weights" if training.ema is not None else ""
    return "held-out " + ", ".join(metric_in_words(name, value) for name, value in figures) + whose


def describe_training(training: Training, *, with_loss: bool = True) -> str:
    """Describe the work of the training, with its loss or without."""
    steps = plural(training.optimizer_steps, "step")
    words = [f"{steps}, {plural(training.samples, 'sample')}"]
    if training.samples_per_s is not None:
        words.append(f"{training.samples_per_s:,.0f} samples/s")
    if with_loss:
        words.append(_loss(training))
    if training.skipped_steps:
        words.append(f"{plural(training.skipped_steps, 'step')} skipped")
    if training.oom_recoveries:
        words.append(f"{plural(training.oom_recoveries, 'recovery', 'recoveries')} from out of memory")
    return ", ".join(words)


def _loss(training: Training) -> str:
    if training.first_loss is None or training.final_loss is None:
        return "loss unknown"
    return f"loss {training.first_loss:.4f} → {training.final_loss:.4f}"


def describe_fit(run: RunRecord) -> str:
    """Describe how many samples fit at a time, in the configuration that is planned."""
    plan, probe = run.plan, run.probe
    budget = format_bytes(run.device.budget_bytes)
    if plan is not None and (probe is None or not is_probed_configuration(probe, plan)):
        return f"{_at_a_time(plan.micro_batch)} in {budget}, in the planned configuration"
    if plan is not None and plan.run_order is not None:
        return f"{_at_a_time(plan.micro_batch)} in {budget}, in the order of this run"
    if probe is None:
        return f"{budget} of memory"
    size = " of the largest size" if plan is not None and plan.size_cut is not None else ""
    return f"{_at_a_time(probe.micro_batch, size)}{_on_ranks(probe)} in {budget}{_evidence(probe)}"


def _at_a_time(samples: int, size: str = "") -> str:
    return f"{plural(samples, 'sample')}{size} at a time"


def summary_lines(run: RunRecord, *, out: Path | None = None, report: Path | None = None) -> list[Line]:
    """Return the final lines: first what fits, the plan, what was reached and where it is, then the details.

    Args:
        run: the records.
        out: the folder of the run; None if there is none.
        report: the report page; None if there is none.
    """
    return [*_main_lines(run, out), *_detail_lines(run, report)]


def _main_lines(result: RunRecord, out: Path | None) -> Iterator[Line]:
    if result.probe is not None or result.plan is not None:
        yield Line("fits", describe_fit(result), "main")
    if result.plan is not None:
        yield Line("plan", describe_plan(result.plan), "main")
    if result.training is not None:
        yield Line("reached", describe_reached(result.training), "main")
    elif result.tuning is not None and result.tuning.trials:
        yield Line("tuned", describe_tuning(result.tuning, result.plan), "main")
    if out is not None and result.training is not None:
        yield Line("saved in", str(out), "main")


def _detail_lines(result: RunRecord, report: Path | None) -> Iterator[Line]:
    training, tuning = result.training, result.tuning
    if tuning is not None and tuning.trials and training is not None:
        yield Line("tuned", describe_tuning(tuning, result.plan, training.optimizer_steps))
    if tuning is not None and tuning.learning_rate is not None:
        yield Line("rate", describe_rate(tuning.learning_rate))
    if training is not None:
        # Without held-out figures the line above has the loss.
        yield Line("trained", describe_training(training, with_loss=bool(training.validation)))
        if training.noise_advice is not None:
            yield Line("noise", training.noise_advice)
    if report is not None:
        yield Line("report", str(report), "path")
    if result.command:
        yield Line("run again", result.command)


def text_of(run: RunRecord, *, out: Path | None = None) -> str:
    """Return the summary as text, without the paths of single files."""
    lines = [line for line in summary_lines(run, out=out) if line.kind != "path"]
    return "\n".join(f"{line.label:<10} {line.text}" for line in lines)


def describe_estimate(one: Estimate) -> str:
    """Describe what is predicted to fit on a GPU."""
    budget = format_bytes(one.budget_bytes)
    if one.world_size > 1:
        budget += f" on each of {one.world_size:,} ranks ({one.parallel})"
    if not one.fits:
        return f"{one.profile}: does not fit in {budget} ({one.precision})"
    plan = "" if one.plan is None else f", batch {count(one.plan.target_batch)} in {describe_split(one.plan)}"
    return f"{one.profile}: {count(one.micro_batch)} samples at a time in {budget} ({one.precision}){plan}"


def describe_budget(device: DeviceRecord) -> str:
    """Describe the memory budget and its source."""
    return f"{format_bytes(device.budget_bytes)} ({device.budget_source.rstrip('.')})"
