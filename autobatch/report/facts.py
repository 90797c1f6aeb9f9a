"""The facts of a result in words: one list and one wording for the terminal, the page, the notebook, the log.

`facts_of` lists what is known of a run, in reading order. A terminal prints the main facts and the details.
The report page shows all of them, part by part. To say something new about a run, add a fact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from autobatch.core.files import AVERAGED_WEIGHTS
from autobatch.core.records import (
    CHECKPOINTING,
    PRECISION,
    SPLIT,
    Attempt,
    DeviceRecord,
    Plan,
    Probe,
    RunRecord,
    StepRecord,
    Training,
    Trial,
    Tuning,
)
from autobatch.core.units import format_bytes, significant


class Fact(NamedTuple):
    """A fact of a result."""

    part: Literal["fits", "plan", "tuning", "training", "device", "files"]
    """The stage that it belongs to, and so its section of the report."""
    label: str
    text: str
    kind: Literal["main", "detail", "more"] = "detail"
    """``main`` for the few facts that answer the question, ``more`` for those that a terminal leaves out."""


def facts_of(run: RunRecord, *, out: Path | None = None, report: Path | None = None) -> list[Fact]:
    """Return what is known of a run, in reading order.

    Args:
        run: the records.
        out: the folder of the run; None if there is none.
        report: the report page; None if there is none.
    """
    facts = [*device_facts(run.device), *_fits_facts(run)]
    if run.plan is not None:
        facts += _plan_facts(run.plan)
    if run.tuning is not None:
        facts += _tuning_facts(run.tuning, "detail" if run.training else "main")
    if run.training is not None:
        facts += _training_facts(run.training)
        facts.append(Fact("files", "saved in", str(out or ""), "main"))
    facts.append(Fact("files", "report", str(report or "")))
    facts.append(Fact("files", "run again", run.command or ""))
    return [fact for fact in facts if fact.text]


def final_facts(run: RunRecord, *, out: Path | None = None, report: Path | None = None) -> list[Fact]:
    """Return the facts that a terminal prints at the end, those that answer the question first."""
    facts = [fact for fact in facts_of(run, out=out, report=report) if fact.kind != "more"]
    return sorted(facts, key=lambda fact: fact.kind != "main")


def peak_bytes(ran: Attempt | Training | StepRecord) -> int | None:
    """Return the peak that counts against the budget: reserved bytes, or allocated bytes if none are."""
    return ran.peak_allocated_bytes if ran.peak_reserved_bytes is None else ran.peak_reserved_bytes


def device_facts(device: DeviceRecord) -> Iterator[Fact]:
    """Yield the device, its memory, and who holds it."""
    yield Fact("device", "device", f"{device.name} ({device.kind})", "more")
    yield Fact("device", "total", format_bytes(device.total_bytes), "more")
    source = device.budget_source.rstrip(".")
    yield Fact("device", "budget", f"{format_bytes(device.budget_bytes)} ({source})", "more")
    if device.other_processes_bytes is not None:
        yield Fact("device", "others", format_bytes(device.other_processes_bytes), "more")
    for holder in device.holders:
        who = "a process" if holder.pid is None else f"process {holder.pid}"
        name = f" {holder.name}" if holder.name else ""
        yield Fact("device", "", f"{who}{name}: {format_bytes(holder.used_bytes)}", "more")


def _fits_facts(run: RunRecord) -> Iterator[Fact]:
    """Yield how many samples fit at a time, both as planned and as probed if these differ."""
    plan, probe = run.plan, run.probe
    place = f" in {format_bytes(run.device.budget_bytes)}"
    if plan is not None and not is_probed_configuration(probe, plan):
        tuned = f"{plural(plan.micro_batch, 'sample')} at a time{place} as tuned"
        yield Fact("fits", "fits", f"{tuned}, {probe.micro_batch:,} before", "main")
    else:
        size = " of the largest size" if plan is not None and plan.size_cut is not None else ""
        yield Fact("fits", "fits", _describe_fits(probe, place, size), "main")
    errors = plural(probe.oom_count, "out-of-memory error") if probe.oom_count else "no out-of-memory error"
    yield Fact("fits", "runs", f"{plural(len(probe.attempts), 'size')} ran, with {errors}", "more")


def is_probed_configuration(probe: Probe, plan: Plan) -> bool:
    """Return whether the limit of a probe is that of the plan's configuration."""
    return not plan.knobs and probe.precision in (None, plan.precision)


def _describe_fits(probe: Probe, place: str, size: str) -> str:
    """Describe how many samples fit, and the evidence: ``196 samples at a time; 197 ran and do not``."""
    fits = f"{plural(probe.micro_batch, 'sample')}{size} at a time{place}"
    fits += on_each_rank(probe.world_size, probe.parallel)
    if probe.source == "asked":
        return fits
    bound, is_saved = probe.upper_bound_by or "cap", probe.source.startswith("saved ")
    runs = f"{probe.source.replace(' ', ' on ')}, confirmed by one run"
    runs = runs if is_saved else plural(len(probe.attempts), "test run")
    more = f"{probe.micro_batch + probe.multiple:,}"
    evidence = {
        "run": f"{more} ran and do not",
        "error": f"{more} do not run, for another reason than memory",
        "replay": f"{more} do not",
        "cap": {
            "target_batch": "that is the whole target batch",
            "dataset": "those are all samples of the data",
            "max_micro_batch": "more is not allowed by --max-micro-batch",
            "memory": "memory limits it",
        }[probe.limited_by],
    }
    return f"{fits}; {evidence[bound]}" + f" ({runs})" * (is_saved or bound == "replay")


def on_each_rank(world: int, parallel: str | None) -> str:
    """Return the ranks that each do what is said; empty for one process."""
    shared = ", which share the model" if parallel == "shard" else ""
    return "" if world == 1 else f" on each of {world:,} ranks{shared}"


def _plan_facts(plan: Plan) -> Iterator[Fact]:
    parts = [f"batch {plan.target_batch:,} in {describe_split(plan)}"]
    if plan.learning_rate:  # 0 for a program that knows its own, and its precision
        parts += filter(None, [plan.precision, knobs_in_words(plan.knobs)])
        rate, rule = f"lr {significant(plan.learning_rate)}", plan.learning_rate_rule
        by = rule if rule == "tuned" else f"{rule} rule"
        factor = f" ({by}, × {significant(plan.learning_rate_factor)})"
        parts.append(rate if rule == "none" else rate + factor)
    yield Fact("plan", "plan", " · ".join(parts), "main")
    yield Fact("plan", "learning rate", plan.learning_rate_source, "more")
    if plan.size_cut is not None:
        words = "each batch is sorted by size and cut where little is padding; its gradient stays the same"
        yield Fact("plan", "padding", words, "more")


def describe_split(plan: Plan) -> str:
    """Describe the micro-batches of one rank: ``12 micro-batches (4 × 86, 8 × 85)``."""
    ranks = on_each_rank(plan.world_size, plan.parallel)
    if plan.size_cut is not None:
        return f"micro-batches cut by size{ranks and f',{ranks}'}"
    sizes = plan.micro_batches
    words = plural(len(sizes), "micro-batch", "micro-batches")
    if len(set(sizes)) == 1:
        return f"{words} of {sizes[0]:,}{ranks}"
    kinds = ", ".join(f"{sizes.count(size):,} × {size:,}" for size in sorted({*sizes})[::-1])
    return f"{words} ({kinds}){ranks}"


def _tuning_facts(tuning: Tuning, kind: Literal["main", "detail"]) -> Iterator[Fact]:
    if tuning.trials:
        speed = f"{significant(tuning.best_samples_per_s)} samples/s in the trials"
        gain = f"at least {tuning.low or 0:.2f} × faster: {knobs_in_words(tuning.changes, ' + ')}"
        yield Fact("tuning", "tuned", f"kept the default, {speed}" if tuning.low is None else gain, kind)
    yield Fact("tuning", "offered", "; ".join(tuning.offers), kind)
    if (rate := tuning.learning_rate) is not None:
        best, default = (
            f"{significant(value)} ({'no loss' if loss is None else f'loss {significant(loss, 4)}'})"
            for value, loss in ((rate.best, rate.best_loss), (rate.default, rate.default_loss))
        )
        choice = f"kept {best}" if rate.best == rate.default else f"{best} instead of {default}"
        tried = f"{plural(rate.trials, 'learning rate')} tried in runs of {plural(rate.steps, 'step')}"
        yield Fact("tuning", "rate", f"{choice}: {tried}")
    if tuning.low is not None:
        best, default = significant(tuning.best_samples_per_s), significant(tuning.baseline_samples_per_s)
        yield Fact("tuning", "speeds", f"{best} samples/s, the default {default}", "more")


def describe_trial(trial: Trial, changes: Mapping[str, object]) -> str:
    """Describe a trial: ``default: 24,372 samples/s``, ``bf16, channels-last: 1.29 × the default``.

    Only the ratio is of one moment: the speed of a machine changes from trial to trial.
    """
    what = knobs_in_words(changes) or "default"
    if trial.samples_per_s is None:
        return f"{what}: left out, {trial.note}"
    if changes and trial.relative is not None:
        return f"{what}: {trial.relative:.2f} × the default"
    return f"{what}: {significant(trial.samples_per_s)} samples/s"


def _training_facts(training: Training) -> Iterator[Fact]:
    loss = "loss unknown"
    if training.first_loss is not None and training.final_loss is not None:
        first, final = (significant(value, 4) for value in (training.first_loss, training.final_loss))
        loss = f"loss {first} → {final}{terms_in_words(training.final_terms)}"
    whose = " of the averaged weights" if training.ema is not None else ""
    held_out = f"held-out {', '.join(metrics_in_words(training.validation))}{whose}"
    yield Fact("training", "reached", held_out if training.validation else f"training {loss}", "main")
    words = [plural(training.optimizer_steps, "step"), plural(training.samples, "sample")]
    if training.samples_per_s is not None:
        words.append(f"{significant(training.samples_per_s)} samples/s")
    if training.validation:  # otherwise the line above has the loss
        words.append(loss)
    if training.skipped_steps:
        words.append(f"{plural(training.skipped_steps, 'step')} skipped")
    if training.oom_recoveries:
        recoveries = plural(training.oom_recoveries, "recovery", "recoveries")
        words.append(f"{recoveries} from out of memory")
        if training.micro_batch is not None:
            words.append(f"micro-batch {training.micro_batch:,} at the end")
    yield Fact("training", "trained", ", ".join(words))
    if (peak := peak_bytes(training)) is not None:
        yield Fact("training", "peak memory", format_bytes(peak), "more")
    if training.ema is not None:
        weights = f"decay {training.ema:g}, exported to {AVERAGED_WEIGHTS}"
        yield Fact("training", "averaged", weights, "more")
    yield Fact("training", "resumed from", training.resumed_from or "", "more")
    yield Fact("training", "checkpoint", training.checkpoint or "", "more")


def moment(created: str | None) -> str:
    """Write a time of a record, which is UTC, to the minute: ``2026-11-22 17:14 UTC``; empty for None."""
    return f"{created[:16].replace('T', ' ')} UTC" if created else ""


def plural(number: int, one: str, more: str | None = None) -> str:
    """Write a number with its noun: ``1 sample``, ``2 samples``."""
    return f"{number:,} {one if number == 1 else more or one + 's'}"


def metric_in_words(name: str, value: float | None) -> str:
    """Write a held-out figure: ``accuracy 97.22 %``, ``loss 0.1017``."""
    if value is None:
        return f"{name} not finite"
    is_share = "acc" in name and 0 <= value <= 1
    return f"{name} {100 * value:.2f} %" if is_share else f"{name} {significant(value, 4)}"


def metrics_in_words(validation: Mapping[str, float | None]) -> list[str]:
    """Write the held-out figures, the loss after the others."""
    figures = sorted(validation.items(), key=lambda item: item[0] == "loss")
    return [metric_in_words(name, value) for name, value in figures]


def terms_in_words(terms: Mapping[str, float | None]) -> str:
    """Write the terms whose sum is a loss, to follow it: `` (boxes 0.31, classes 0.7)``; empty for none."""
    return f" ({', '.join(metric_in_words(name, value) for name, value in terms.items())})" if terms else ""


def knobs_in_words(values: Mapping[str, object], between: str = ", ") -> str:
    """Write the values of knobs: ``bf16, channels-last, micro-batch halved``."""
    return between.join(_knob_in_words(name, value) for name, value in values.items())


def _knob_in_words(name: str, value: object) -> str:
    plain = name.replace("_", "-")
    if name == SPLIT and isinstance(value, int):
        few = ("largest micro-batch", "micro-batch halved")
        return few[value] if value < 2 else f"micro-batch ÷ {2**value}"
    if name == PRECISION:
        return str(value)
    if name == CHECKPOINTING:
        return f"{'no ' * (value == 'none')}{plain}"
    return f"{'' if value else 'no '}{plain}" if isinstance(value, bool) else f"{plain} {value}"
