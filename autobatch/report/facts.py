"""The facts of a result in words: one list and one wording for the terminal, the page, the notebook, the log.

`facts_of` lists what is known of a run, in reading order. A terminal prints the main facts and the details.
The report page and a notebook show all of them, part by part. To say something new about a run, add a fact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from autobatch.core.records import (
    Attempt,
    DeviceRecord,
    Estimate,
    LrTuning,
    Plan,
    Probe,
    Recorded,
    RunRecord,
    SizeCut,
    StepRecord,
    Training,
    Trial,
    Tuning,
)
from autobatch.core.units import format_bytes
from autobatch.report.words import (
    count,
    decimal,
    knob_name,
    knobs_in_words,
    metrics_in_words,
    plural,
    ratio_in_words,
    terms_in_words,
)

Part = Literal["device", "fits", "plan", "tuning", "training", "files"]


class Fact(NamedTuple):
    """A fact of a result."""

    part: Part
    """The stage that it belongs to, and so its section of the report."""
    label: str
    text: str
    kind: Literal["main", "detail", "path", "more"] = "detail"
    """``main`` for the few facts that answer the question, ``path`` for a file or folder, ``more`` for those
    that a terminal leaves out."""


class Tile(NamedTuple):
    """One of the few figures below the headline of a report."""

    name: str
    figure: str
    note: str


def facts_of(run: RunRecord, *, out: Path | None = None, report: Path | None = None) -> list[Fact]:
    """Return what is known of a run, in reading order.

    Args:
        run: the records.
        out: the folder of the run; None if there is none.
        report: the report page; None if there is none.
    """
    found = [*device_facts(run.device), *_fits_facts(run)]
    if run.plan is not None:
        found += _plan_facts(run.plan)
    if run.tuning is not None:
        found += _tuning_facts(run.tuning, run.training)
    if run.training is not None:
        found += _training_facts(run.training)
        found.append(Fact("files", "saved in", str(out or ""), "main"))
    found.append(Fact("files", "report", str(report or ""), "path"))
    found.append(Fact("files", "run again", run.command or ""))
    return [fact for fact in found if fact.text]


def final_facts(run: RunRecord, *, out: Path | None = None, report: Path | None = None) -> list[Fact]:
    """Return the facts that a terminal prints at the end, those that answer the question first."""
    found = facts_of(run, out=out, report=report)
    main = [fact for fact in found if fact.kind == "main"]
    return main + [fact for fact in found if fact.kind in ("detail", "path")]


def text_of(run: RunRecord, *, out: Path | None = None) -> str:
    """Return the final facts as text, without the paths of single files."""
    lines = [fact for fact in final_facts(run, out=out) if fact.kind != "path"]
    return "\n".join(f"{fact.label:<10} {fact.text}" for fact in lines)


def headline(run: RunRecord) -> str:
    """Sum up a run in a sentence or two."""
    place = f"{format_bytes(run.device.budget_bytes)} on {run.device.name}"
    if run.training is not None and run.plan is not None:
        steps = plural(run.training.optimizer_steps, "optimizer step")
        batch = plural(run.plan.target_batch, "sample")
        return f"{steps} of exactly {batch} in {place}. {_sentence(describe_reached(run.training))}"
    if run.plan is not None:
        return f"Batch {count(run.plan.target_batch)} in {describe_split(run.plan)}, in {place}."
    if run.probe is not None:
        return _sentence(describe_fits(run.probe, f" in {place}"))
    return f"The memory budget is {place}."


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def tiles_of(run: RunRecord) -> list[Tile]:
    """Return the few figures that matter most."""
    plan, probe, training, tuning = run.plan, run.probe, run.training, run.tuning
    found = []
    if plan is not None:
        found.append(Tile("Batch", count(plan.effective_batch), f"exactly, in {_number_of_parts(plan)}"))
        size = plan.micro_batch if plan.size_cut is None else plan.size_cut.micro_batch
        note = _limit_of(plan, probe)
        if training is not None and training.oom_recoveries and training.micro_batch is not None:
            recoveries = plural(training.oom_recoveries, "recovery", "recoveries")
            note = f"{count(training.micro_batch)} after {recoveries} from out of memory, {plan.precision}"
        found.append(Tile("Micro-batch", count(size), note))
    elif probe is not None:
        found.append(Tile("Micro-batch", count(probe.micro_batch), _CAPS[probe.limited_by]))
    found.append(_memory_tile(run))
    if training is not None and training.samples_per_s is not None:
        found.append(Tile("Throughput", decimal(training.samples_per_s, 3), "samples/s"))
    elif tuning is not None and tuning.trials and tuning.best_samples_per_s:
        found.append(
            Tile("Throughput", decimal(tuning.best_samples_per_s, 3), "samples/s, measured while tuning")
        )
    return found


def _number_of_parts(plan: Plan) -> str:
    if plan.size_cut is not None:
        return f"about {plan.size_cut.steps:.1f} micro-batches"
    parts = plural(plan.accumulation_steps, "micro-batch", "micro-batches")
    return parts + _on_each_rank(plan.world_size)


def _limit_of(plan: Plan, probe: Probe | None) -> str:
    """Return the limit of the plan's configuration; the limit of another one says nothing about it."""
    if plan.size_cut is not None:
        return f"of the longest samples fit, and more of shorter ones, {plan.precision}"
    if probe is None or not is_probed_configuration(probe, plan):
        return ", ".join(filter(None, (plan.precision, knobs_in_words(plan.knobs))))
    known = "up to {} fit" if probe.stopped_by is None else "{} are known to fit"
    return f"{known.format(count(probe.micro_batch))}, {plan.precision}"


def _memory_tile(run: RunRecord) -> Tile:
    """Return the peak of the training, else that of the probe, which may be of another configuration."""
    budget = format_bytes(run.device.budget_bytes)
    if run.training is not None and peak_bytes(run.training):
        return Tile("Peak memory", format_bytes(peak_bytes(run.training)), f"of {budget}, while training")
    ran = [(peak_bytes(one) or 0, one) for one in (run.probe.attempts if run.probe else []) if one.fits]
    peak, largest = max(ran, key=lambda pair: pair[0], default=(0, None))
    if run.probe is None or largest is None or not peak:
        return Tile("Budget", budget, run.device.name)
    what = ", ".join(filter(None, (plural(largest.micro_batch, "sample"), run.probe.precision)))
    return Tile("Peak in the probe", format_bytes(peak), f"of {budget}, {what}")


def peak_bytes(ran: Attempt | Training | StepRecord) -> int | None:
    """Return the peak that counts against the budget: reserved bytes, or allocated bytes if none are."""
    if ran.peak_reserved_bytes is None:
        return ran.peak_allocated_bytes
    return ran.peak_reserved_bytes


# Device


def device_facts(device: DeviceRecord) -> list[Fact]:
    """Return the device, its memory, and who holds it."""
    found = [
        Fact("device", "device", f"{device.name} ({device.kind})", "more"),
        Fact("device", "total", format_bytes(device.total_bytes), "more"),
        Fact("device", "budget", describe_budget(device), "more"),
    ]
    if device.other_processes_bytes is not None:
        found.append(Fact("device", "others", format_bytes(device.other_processes_bytes), "more"))
    for holder in device.holders:
        who = f"process {holder.pid}" if holder.pid is not None else "a process"
        name = f" {holder.name}" if holder.name else ""
        found.append(Fact("device", "", f"{who}{name}: {format_bytes(holder.used_bytes)}", "more"))
    return found


def describe_budget(device: DeviceRecord) -> str:
    """Describe the memory budget and its source."""
    return f"{format_bytes(device.budget_bytes)} ({device.budget_source.rstrip('.')})"


# What fits

_CAPS = {
    "target_batch": "that is the whole target batch",
    "dataset": "those are all samples of the data",
    "max_micro_batch": "more is not allowed by --max-micro-batch",
    "memory": "memory limits it",
}
"""Reasons why a micro-batch is not larger."""


def _fits_facts(run: RunRecord) -> Iterator[Fact]:
    if run.probe is None and run.plan is None:
        return
    yield Fact("fits", "fits", _fits_in_plan(run), "main")
    if run.probe is not None:
        yield Fact("fits", "runs", _describe_runs(run.probe), "more")
        yield Fact("fits", "real batches", _describe_real_batches(run.probe), "more")


def _fits_in_plan(run: RunRecord) -> str:
    """Describe how many samples fit at a time, both as planned and as probed if these differ."""
    plan, probe = run.plan, run.probe
    place = f" in {format_bytes(run.device.budget_bytes)}"
    if plan is None or (probe is not None and is_probed_configuration(probe, plan)):
        assert probe is not None
        size = " of the largest size" if plan is not None and plan.size_cut is not None else ""
        return describe_fits(probe, place, size)
    tuned = f"{plural(plan.micro_batch, 'sample')} at a time{place} as tuned"
    return tuned if probe is None else f"{tuned}, {count(probe.micro_batch)} before"


def describe_fits(probe: Probe, place: str = "", size: str = "") -> str:
    """Describe how many samples fit, and the evidence: ``196 samples at a time; 197 ran and do not``.

    Args:
        probe: the probe.
        place: the memory that they fit in, for example ``" in 6.00 GiB"``.
        size: which samples, for example ``" of the largest size"``.
    """
    ranks = _on_each_rank(probe.world_size, probe.parallel)
    return f"{plural(probe.micro_batch, 'sample')}{size} at a time{place}{ranks}{_evidence(probe)}"


def _evidence(probe: Probe) -> str:
    """Return why no more samples fit; empty if only this size was asked for."""
    if probe.source == "asked":
        return ""
    if probe.source.startswith("saved "):
        return f" (saved on {probe.source.removeprefix('saved ')}, confirmed by one run)"
    more = count(probe.micro_batch + probe.multiple)
    return {
        "run": f"; {more} ran and do not",
        "error": f"; {more} do not run, for another reason than memory",
        "replay": f"; {more} do not ({plural(len(probe.attempts), 'test run')})",
        "cap": f"; {_CAPS[probe.limited_by]}",
        None: f"; more may: the {probe.stopped_by} ended the search",
    }[probe.upper_bound_by]


_SHARED = {"shard": ", which share the model", "replicate": "", None: ""}


def _on_each_rank(world: int, parallel: str | None = None) -> str:
    """Return the ranks that each do what is said; empty for one process."""
    return "" if world == 1 else f" on each of {count(world)} ranks{_SHARED[parallel]}"


def _describe_runs(probe: Probe) -> str:
    ooms = plural(probe.oom_count, "out-of-memory error") if probe.oom_count else "no out-of-memory error"
    return f"{plural(len(probe.attempts), 'size')} ran, with {ooms}"


def _describe_real_batches(probe: Probe) -> str:
    """Describe the check of a limit against real batches; empty if there was none."""
    found = probe.real_batches
    if found is None:
        return ""
    alone = count(found.micro_batch_alone)
    lower = f"of the longest samples alone, {alone} fit, but many sizes fragment the memory"
    if not found.batches:
        return f"batches of the run do not fit: {lower}"
    words = f"{plural(found.batches, 'batch', 'batches')} of the run ran too, because samples differ in size"
    return words if found.micro_batch_alone <= probe.micro_batch else f"{words}: {lower}"


def is_probed_configuration(probe: Probe, plan: Plan) -> bool:
    """Return whether the limit of a probe is that of the plan's configuration."""
    return not plan.knobs and probe.precision in (None, plan.precision)


# The plan


def _plan_facts(plan: Plan) -> Iterator[Fact]:
    yield Fact("plan", "plan", describe_plan(plan), "main")
    yield Fact("plan", "learning rate", describe_learning_rate(plan), "more")
    if plan.base_batch is not None:
        yield Fact("plan", "tuned for", f"a batch of {plural(plan.base_batch, 'sample')}", "more")
    if plan.size_cut is not None:
        yield Fact("plan", "padding", _describe_padding(plan.size_cut), "more")


def describe_plan(plan: Plan) -> str:
    """Describe the plan: ``batch 1,024 in 12 micro-batches (4 × 86, 8 × 85) · bf16 · lr 0.0003``."""
    words = [f"batch {count(plan.target_batch)} in {describe_split(plan)}"]
    if not plan.learning_rate:  # of a program that knows its own, and its precision
        return words[0]
    words.append(plan.precision)
    if plan.knobs:
        words.append(knobs_in_words(plan.knobs))
    rate = f"lr {decimal(plan.learning_rate, 3)}"
    if plan.learning_rate_rule == "tuned":
        rate += f" (tuned, × {decimal(plan.learning_rate_factor, 3)})"
    elif plan.learning_rate_rule != "none":
        rate += f" ({plan.learning_rate_rule} rule, × {decimal(plan.learning_rate_factor, 3)})"
    return " · ".join([*words, rate])


def describe_split(plan: Plan) -> str:
    """Describe the micro-batches of one rank: ``12 micro-batches (4 × 86, 8 × 85)``."""
    ranks = _on_each_rank(plan.world_size, plan.parallel)
    if plan.size_cut is not None:
        words = f"about {plan.size_cut.steps:.1f} micro-batches, cut by size"
        return f"{words},{ranks}" if ranks else words
    sizes = plan.micro_batches or [plan.micro_batch] * plan.accumulation_steps
    return f"{_sizes_in_words(sizes)}{ranks}"


def _sizes_in_words(sizes: Sequence[int]) -> str:
    kinds = sorted(set(sizes), reverse=True)
    words = plural(len(sizes), "micro-batch", "micro-batches")
    if len(kinds) == 1:
        return f"{words} of {count(kinds[0])}"
    parts = ", ".join(f"{count(sizes.count(size))} × {count(size)}" for size in kinds)
    return f"{words} ({parts})" if kinds else words


def describe_learning_rate(plan: Plan) -> str:
    """Describe the learning rate, its rule, factor and source."""
    rate, source = decimal(plan.learning_rate), plan.learning_rate_source
    if not plan.learning_rate:
        return source
    if plan.learning_rate_rule == "none":
        return f"{rate}, {source or 'as declared'}"
    rule = "" if plan.learning_rate_rule == "tuned" else f" by the {plan.learning_rate_rule} rule"
    words = f"{rate}, {decimal(plan.learning_rate_factor)} times the declared rate{rule}"
    return f"{words} ({source})" if source else words


def _describe_padding(cut: SizeCut) -> str:
    """Describe what a split by size saves."""
    return (
        "each batch is sorted by size and cut where little is padding; its gradient stays the same. For each "
        f"token or element of a sample, {cut.padding:.2f} are computed with the padding, and "
        f"{cut.padding_by_count:.2f} if batches were split by count"
    )


# Tuning


def _tuning_facts(tuning: Tuning, training: Training | None) -> Iterator[Fact]:
    kind: Literal["main", "detail"] = "detail" if training else "main"
    if tuning.trials:
        yield Fact("tuning", "tuned", describe_tuning(tuning), kind)
    yield Fact("tuning", "offered", "; ".join(tuning.offers), kind)
    if tuning.learning_rate is not None:
        yield Fact("tuning", "rate", describe_rate(tuning.learning_rate))
    if tuning.trials:
        if tuning.low is not None and tuning.high is not None:
            best, default = (
                decimal(speed, 3) for speed in (tuning.best_samples_per_s, tuning.baseline_samples_per_s)
            )
            between = f"{tuning.low:.2f} × to {tuning.high:.2f} ×"
            yield Fact(
                "tuning",
                "speeds",
                f"{best} samples/s, the default {default}; 96 % interval {between}",
                "more",
            )
        yield Fact("tuning", "tried", describe_tried(tuning.history) if tuning.history else "", "more")
        yield Fact("tuning", "study", tuning.study, "more")


def describe_trial(trial: Trial, changes: Mapping[str, object]) -> str:
    """Describe a trial: ``bf16, channels-last: 24,372 samples/s (29 % faster)``."""
    what = knobs_in_words(changes) or "default"
    if trial.samples_per_s is None:
        return f"{what}: left out, {trial.note}"
    speed = f"{decimal(trial.samples_per_s, 3)} samples/s"
    if changes and trial.relative is not None:
        speed += f" ({ratio_in_words(trial.relative)})"
    return f"{what}: {speed}"


def describe_tuning(tuning: Tuning) -> str:
    """Return the answer of the tuner, with the lower bound of its gain."""
    if tuning.low is None:
        return f"kept the default, {decimal(tuning.best_samples_per_s, 3)} samples/s"
    return f"at least {tuning.low:.2f} × faster: {knobs_in_words(tuning.changes, ' + ')}"


def describe_tried(trials: Sequence[Trial]) -> str:
    """Describe how many configurations were tried, and which knobs differed between them."""
    values: dict[str, set[object]] = {}
    for trial in trials:
        for name, value in trial.parameters.items():
            values.setdefault(name, set()).add(value)
    knobs = [knob_name(name) for name, seen in values.items() if len(seen) > 1]
    infeasible = sum(trial.relative is None for trial in trials)
    without = f", {count(infeasible)} infeasible" if infeasible else ""
    of = f" of {', '.join(knobs)}" if knobs else ""
    return f"{plural(len(trials), 'configuration')}{of}{without}"


def describe_rate(found: LrTuning) -> str:
    """Describe the choice of the learning rate."""
    tried = f"{plural(found.trials, 'learning rate')} tried in runs of {plural(found.steps, 'step')}"
    if found.best == found.default:
        return f"kept {decimal(found.default, 3)}: {tried}"
    best, default = (
        "no loss" if loss is None else f"loss {decimal(loss)}"
        for loss in (found.best_loss, found.default_loss)
    )
    return f"{decimal(found.best, 3)} ({best}) instead of {decimal(found.default, 3)} ({default}): {tried}"


# Training


def _training_facts(training: Training) -> Iterator[Fact]:
    yield Fact("training", "reached", describe_reached(training), "main")
    # Without held-out figures the line above has the loss.
    yield Fact("training", "trained", describe_training(training, with_loss=bool(training.validation)))
    if training.ema is not None:
        weights = f"decay {training.ema:g}, exported to model-ema.safetensors"
        yield Fact("training", "averaged", weights, "more")
    yield Fact("training", "resumed from", training.resumed_from or "", "more")
    yield Fact("training", "checkpoint", training.checkpoint or "", "more")


def describe_reached(training: Training) -> str:
    """Describe what the training reached: the held-out figures, else the loss."""
    if not training.validation:
        return f"training {_loss(training)}"
    whose = " of the averaged weights" if training.ema is not None else ""
    return f"held-out {', '.join(metrics_in_words(training.validation))}{whose}"


def describe_training(training: Training, *, with_loss: bool = True) -> str:
    """Describe the work of the training, with its loss or without."""
    steps = plural(training.optimizer_steps, "step")
    words = [f"{steps}, {plural(training.samples, 'sample')}"]
    if training.samples_per_s is not None:
        words.append(f"{decimal(training.samples_per_s, 3)} samples/s")
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
    loss = f"loss {training.first_loss:.4f} → {training.final_loss:.4f}"
    return loss + terms_in_words(training.final_terms)


# Estimates


def describe_estimate(one: Estimate) -> str:
    """Describe what is predicted to fit on a GPU."""
    budget = format_bytes(one.budget_bytes) + _on_each_rank(one.world_size, one.parallel)
    precision = "" if one.precision is None else f" ({one.precision})"
    if not one.fits:
        return f"{one.profile}: does not fit in {budget}{precision}"
    plan = "" if one.plan is None else f", batch {count(one.plan.target_batch)} in {describe_split(one.plan)}"
    return f"{one.profile}: {count(one.micro_batch)} samples at a time in {budget}{precision}{plan}"


def recorded_lines(recorded: Recorded) -> list[str]:
    """Describe a program that was recorded: its peaks, and why memory ran out."""
    gap = recorded.peak_reserved_bytes - recorded.peak_allocated_bytes
    lines = [
        f"peak reserved {format_bytes(recorded.peak_reserved_bytes)}, allocated "
        f"{format_bytes(recorded.peak_allocated_bytes)}: {format_bytes(gap)} between them "
        f"({gap / max(1, recorded.peak_reserved_bytes):.0%}) are fragmentation",
    ]
    refused, expandable = recorded.refused, format_bytes(recorded.expandable_bytes)
    if refused is None:
        lines.append(f"expandable_segments:True would reserve {expandable}")
        return lines
    unused = refused.reserved_bytes - refused.allocated_bytes
    largest = (
        ""
        if refused.largest_free_bytes is None
        else f", at most {format_bytes(refused.largest_free_bytes)} in one piece"
    )
    verdict = {
        "fragmented": "as much was free, but in pieces: fragmented",
        "limited": "the GPU had enough: a limit of the process held it back",
        "full": f"it lacked {format_bytes(refused.asked_bytes - unused - refused.device_free_bytes)}",
    }
    lines += [
        f"out of memory: asked for {format_bytes(refused.asked_bytes)}, and free were "
        f"{format_bytes(refused.device_free_bytes)} on the GPU and {format_bytes(unused)} of the "
        f"{format_bytes(refused.reserved_bytes)} that were reserved{largest}; {verdict[refused.reason]}",
        f"with that request it needs {format_bytes(recorded.needed_bytes)}, and {expandable} with "
        "expandable_segments:True, and more later",
    ]
    return lines
