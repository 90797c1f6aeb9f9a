"""Summary of a result, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autobatch.core.records import LrTuning, Plan, Probe, Training, Tuning
    from autobatch.report.result import Result

LIMITS = {
    "memory": "memory",
    "target_batch": "the target batch",
    "dataset": "the number of samples",
    "max_micro_batch": "--max-micro-batch",
}
"""Limits of a micro-batch, in words."""


def describe_probe(probe: Probe) -> tuple[str, str]:
    """Return a label and the size that fits."""
    size = f"micro-batch {probe.micro_batch:,}"
    if probe.source == "asked":
        return "fits", size
    if probe.stopped_by is not None:
        return "fits", f"{size}, and more may: the {probe.stopped_by} ended the search"
    return "largest", f"{size}, limited by {LIMITS[probe.limited_by]}"


def describe_plan(plan: Plan) -> str:
    """Describe the split: ``1,024 = 4 × 86 + 8 × 85, …``."""
    sizes = plan.micro_batches
    parts = [f"{sizes.count(size)} × {size}" for size in sorted(set(sizes), reverse=True)]
    ranks = f" on each of {plan.world_size} ranks" if plan.world_size > 1 else ""
    rate = f"learning rate {plan.learning_rate:.3g}"
    if plan.learning_rate_rule == "tuned":
        rate += f" (tuned, × {plan.learning_rate_factor:.3g})"
    elif plan.learning_rate_rule != "none":
        rate += f" ({plan.learning_rate_rule} rule, × {plan.learning_rate_factor:.3g})"
    knobs = "".join(f", {name} {value}" for name, value in plan.knobs.items())
    split = " + ".join(parts)
    if plan.size_cut is not None and plan.size_cut.steps is not None:
        split = f"about {plan.size_cut.steps:.1f} micro-batches, cut by size"
    return f"{plan.target_batch:,} = {split}{ranks}, {plan.precision}{knobs}, {rate}"


def describe_tuning(tuning: Tuning) -> str:
    """Describe the gain over the default configuration."""
    if not tuning.best_samples_per_s:
        return "kept the default: it could not be measured"
    if tuning.best_samples_per_s <= tuning.baseline_samples_per_s or not tuning.baseline_samples_per_s:
        return f"kept the default, {tuning.best_samples_per_s:,.0f} samples/s"
    gain = tuning.best_samples_per_s / tuning.baseline_samples_per_s
    return (
        f"{tuning.best_samples_per_s:,.0f} samples/s, {gain:.2f} × the default "
        f"({tuning.baseline_samples_per_s:,.0f} samples/s)"
    )


def describe_rate(found: LrTuning) -> str:
    """Describe the choice of the learning rate."""
    tried = f"{found.trials} learning rates tried in runs of {found.steps:,} steps"
    if found.best == found.default:
        return f"kept {found.default:.3g}: {tried}"
    best, default = (
        "no loss" if loss is None else f"loss {loss:.4g}" for loss in (found.best_loss, found.default_loss)
    )
    return f"{found.best:.3g} ({best}) instead of {found.default:.3g} ({default}): {tried}"


def describe_training(training: Training) -> str:
    """Describe the training."""
    whose = "held-out" if training.ema is None else "averaged weights' held-out"
    held_out = "".join(
        f", {whose} {name} {_format_metric(name, value)}" for name, value in training.validation.items()
    )
    loss = (
        "" if training.final_loss is None else f", loss {training.first_loss:.4f} → {training.final_loss:.4f}"
    )
    recoveries = (
        f", {training.oom_recoveries} recoveries from out of memory" if training.oom_recoveries else ""
    )
    skipped = f" and {training.skipped_steps:,} skipped" if training.skipped_steps else ""
    rate = "" if training.samples_per_s is None else f" at {training.samples_per_s:,.0f}/s"
    return (
        f"{training.optimizer_steps:,} steps{skipped}, {training.samples:,} samples{rate}{loss}{held_out}"
        f"{recoveries}"
    )


def _format_metric(name: str, value: float | None) -> str:
    if value is None:
        return "not finite"
    return f"{value:.2%}" if "acc" in name and 0 <= value <= 1 else f"{value:.4f}"


def summary_lines(result: Result) -> list[tuple[str, str]]:
    """Return the final lines, each a label and a text; the last is the command that repeats the call."""
    lines: list[tuple[str, str]] = []
    if result.probe is not None:
        lines.append(describe_probe(result.probe))
    if result.plan is not None:
        lines.append(("plan", describe_plan(result.plan)))
    if result.tuning is not None:
        if result.tuning.trials or result.tuning.learning_rate is None:
            lines.append(("tuned", describe_tuning(result.tuning)))
        if result.tuning.learning_rate is not None:
            lines.append(("rate", describe_rate(result.tuning.learning_rate)))
    if result.training is not None:
        lines.append(("trained", describe_training(result.training)))
        if result.training.noise_advice is not None:
            lines.append(("noise", result.training.noise_advice))
        lines.append(("checkpoint", str(result.training.checkpoint)))
    for label, path in (("report", result.report), ("saved", result.profile)):
        if path is not None:
            lines.append((label, str(path)))
    if result.command:
        lines.append(("repeat", result.command))
    return lines
