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
    StepRecord,
    Training,
    Trial,
    Tuning,
)
from autobatch.core.units import format_bytes
from autobatch.report.words import (
    count,
    decimal,
    knobs_in_words,
    metrics_in_words,
    plural,
    ratio_in_words,
    terms_in_words,
)


class Fact(NamedTuple):
    """A fact of a result."""

    part: Literal["device", "fits", "plan", "tuning", "training", "files"]
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
    facts = [*device_facts(run.device), *_fits_facts(run)]
    if run.plan is not None:
        facts += _plan_facts(run.plan)
    if run.tuning is not None:
        facts += _tuning_facts(run.tuning, "detail" if run.training else "main")
    if run.training is not None:
        facts += _training_facts(run.training)
        facts.append(Fact("files", "saved in", str(out or ""), "main"))
    facts.append(Fact("files", "report", str(report or ""), "path"))
    facts.append(Fact("files", "run again", run.command or ""))
    return [fact for fact in facts if fact.text]


def final_facts(run: RunRecord, *, out: Path | None = None, report: Path | None = None) -> list[Fact]:
    """Return the facts that a terminal prints at the end, those that answer the question first."""
    facts = [fact for fact in facts_of(run, out=out, report=report) if fact.kind != "more"]
    return sorted(facts, key=lambda fact: fact.kind != "main")


def headline(run: RunRecord) -> str:
    """Sum up a run in a sentence or two."""
    place = f"{format_bytes(run.device.budget_bytes)} on {run.device.name}"
    if run.plan is not None and run.training is not None:
        steps = plural(run.training.optimizer_steps, "optimizer step")
        reached = describe_reached(run.training)
        batch = plural(run.plan.target_batch, "sample")
        return f"{steps} of exactly {batch} in {place}. {reached[:1].upper()}{reached[1:]}."
    if run.plan is not None:
        return f"Batch {count(run.plan.target_batch)} in {describe_split(run.plan)}, in {place}."
    if run.probe is not None:
        return f"{describe_fits(run.probe, f' in {place}')}."
    return f"The memory budget is {place}."


def tiles_of(run: RunRecord) -> list[Tile]:
    """Return the few figures that matter most: the batch, the memory and the speed."""
    plan, probe, training = run.plan, run.probe, run.training
    budget, tiles = format_bytes(run.device.budget_bytes), []
    if plan is not None:
        tiles.append(Tile("Batch", count(plan.target_batch), f"exactly, in {describe_split(plan)}"))
    elif probe is not None:
        tiles.append(Tile("Micro-batch", count(probe.micro_batch), "samples at a time"))
    if training is not None and (peak := peak_bytes(training)):
        tiles.append(Tile("Peak memory", format_bytes(peak), f"of {budget}, while training"))
    else:
        tiles.append(Tile("Budget", budget, run.device.name))
    if training is not None and training.samples_per_s is not None:
        tiles.append(Tile("Throughput", decimal(training.samples_per_s, 3), "samples/s"))
    return tiles


def peak_bytes(ran: Attempt | Training | StepRecord) -> int | None:
    """Return the peak that counts against the budget: reserved bytes, or allocated bytes if none are."""
    return ran.peak_allocated_bytes if ran.peak_reserved_bytes is None else ran.peak_reserved_bytes


def device_facts(device: DeviceRecord) -> Iterator[Fact]:
    """Yield the device, its memory, and who holds it."""
    yield Fact("device", "device", f"{device.name} ({device.kind})", "more")
    yield Fact("device", "total", format_bytes(device.total_bytes), "more")
    yield Fact("device", "budget", describe_budget(device), "more")
    if device.other_processes_bytes is not None:
        yield Fact("device", "others", format_bytes(device.other_processes_bytes), "more")
    for holder in device.holders:
        who = "a process" if holder.pid is None else f"process {holder.pid}"
        name = f" {holder.name}" if holder.name else ""
        yield Fact("device", "", f"{who}{name}: {format_bytes(holder.used_bytes)}", "more")


def describe_budget(device: DeviceRecord) -> str:
    """Describe the memory budget and its source."""
    return f"{format_bytes(device.budget_bytes)} ({device.budget_source.rstrip('.')})"


def _fits_facts(run: RunRecord) -> Iterator[Fact]:
    """Yield how many samples fit at a time, both as planned and as probed if these differ."""
    plan, probe = run.plan, run.probe
    place = f" in {format_bytes(run.device.budget_bytes)}"
    if plan is not None and (probe is None or not is_probed_configuration(probe, plan)):
        before = "" if probe is None else f", {count(probe.micro_batch)} before"
        tuned = f"{plural(plan.micro_batch, 'sample')} at a time{place} as tuned{before}"
        yield Fact("fits", "fits", tuned, "main")
    elif probe is not None:
        size = " of the largest size" if plan is not None and plan.size_cut is not None else ""
        yield Fact("fits", "fits", describe_fits(probe, place, size), "main")
    if probe is None:
        return
    errors = plural(probe.oom_count, "out-of-memory error") if probe.oom_count else "no out-of-memory error"
    yield Fact("fits", "runs", f"{plural(len(probe.attempts), 'size')} ran, with {errors}", "more")
    if (real := probe.real_batches) is not None:
        alone = f"of the longest samples alone, {count(real.micro_batch_alone)} fit"
        ran = "batches of the run do not fit"
        if real.batches:
            ran = f"{plural(real.batches, 'batch', 'batches')} of the run ran too, as samples differ in size"
        is_lower = not real.batches or real.micro_batch_alone > probe.micro_batch
        lower = f": {alone}, but many sizes fragment the memory" if is_lower else ""
        yield Fact("fits", "real batches", f"{ran}{lower}", "more")


def is_probed_configuration(probe: Probe, plan: Plan) -> bool:
    """Return whether the limit of a probe is that of the plan's configuration."""
    return not plan.knobs and probe.precision in (None, plan.precision)


def describe_fits(probe: Probe, place: str = "", size: str = "") -> str:
    """Describe how many samples fit, and the evidence: ``196 samples at a time; 197 ran and do not``.

    Args:
        probe: the probe.
        place: the memory that they fit in, for example ``" in 6.00 GiB"``.
        size: which samples, for example ``" of the largest size"``.
    """
    fits = f"{plural(probe.micro_batch, 'sample')}{size} at a time{place}"
    fits += _on_each_rank(probe.world_size, probe.parallel)
    if probe.source == "asked":
        return fits
    if probe.source.startswith("saved "):
        return f"{fits} (saved on {probe.source.removeprefix('saved ')}, confirmed by one run)"
    more = count(probe.micro_batch + probe.multiple)
    evidence = {
        "run": f"{more} ran and do not",
        "error": f"{more} do not run, for another reason than memory",
        "replay": f"{more} do not ({plural(len(probe.attempts), 'test run')})",
        "cap": {
            "target_batch": "that is the whole target batch",
            "dataset": "those are all samples of the data",
            "max_micro_batch": "more is not allowed by --max-micro-batch",
            "memory": "memory limits it",
        }[probe.limited_by],
        None: f"more may: the {probe.stopped_by} ended the search",
    }
    return f"{fits}; {evidence[probe.upper_bound_by]}"


def _on_each_rank(world: int, parallel: str | None) -> str:
    """Return the ranks that each do what is said; empty for one process."""
    shared = ", which share the model" if parallel == "shard" else ""
    return "" if world == 1 else f" on each of {count(world)} ranks{shared}"


def _plan_facts(plan: Plan) -> Iterator[Fact]:
    yield Fact("plan", "plan", describe_plan(plan), "main")
    rate, rule, source = decimal(plan.learning_rate), plan.learning_rate_rule, plan.learning_rate_source
    if rule == "none":
        words = ", ".join(filter(None, [rate, source]))
    else:
        by = "" if rule == "tuned" else f" by the {rule} rule"
        words = f"{rate}, {decimal(plan.learning_rate_factor)} times the declared rate{by}"
        words += f" ({source})" if source else ""
    yield Fact("plan", "learning rate", words if plan.learning_rate else source, "more")
    if (cut := plan.size_cut) is not None:
        words = (
            "each batch is sorted by size and cut where little is padding; its gradient stays the same. For "
            f"each token or element of a sample, {cut.padding:.2f} are computed with the padding, and "
            f"{cut.padding_by_count:.2f} if batches were split by count"
        )
        yield Fact("plan", "padding", words, "more")


def describe_plan(plan: Plan) -> str:
    """Describe the plan: ``batch 1,024 in 12 micro-batches (4 × 86, 8 × 85) · bf16 · lr 0.0003``."""
    words = [f"batch {count(plan.target_batch)} in {describe_split(plan)}"]
    if not plan.learning_rate:  # of a program that knows its own, and its precision
        return words[0]
    words += filter(None, [plan.precision, knobs_in_words(plan.knobs)])
    rate, rule = f"lr {decimal(plan.learning_rate, 3)}", plan.learning_rate_rule
    if rule != "none":
        by = rule if rule == "tuned" else f"{rule} rule"
        rate += f" ({by}, × {decimal(plan.learning_rate_factor, 3)})"
    return " · ".join([*words, rate])


def describe_split(plan: Plan) -> str:
    """Describe the micro-batches of one rank: ``12 micro-batches (4 × 86, 8 × 85)``."""
    ranks = _on_each_rank(plan.world_size, plan.parallel)
    if plan.size_cut is not None:
        return f"about {plan.size_cut.steps:.1f} micro-batches, cut by size" + (ranks and f",{ranks}")
    sizes = plan.micro_batches
    words = plural(len(sizes), "micro-batch", "micro-batches")
    if len(set(sizes)) == 1:
        return f"{words} of {count(sizes[0])}{ranks}"
    kinds = ", ".join(f"{count(sizes.count(size))} × {count(size)}" for size in sorted({*sizes})[::-1])
    return f"{words} ({kinds}){ranks}"


def _tuning_facts(tuning: Tuning, kind: Literal["main", "detail"]) -> Iterator[Fact]:
    if tuning.trials:
        yield Fact("tuning", "tuned", describe_tuning(tuning), kind)
    yield Fact("tuning", "offered", "; ".join(tuning.offers), kind)
    if tuning.learning_rate is not None:
        yield Fact("tuning", "rate", _describe_rate(tuning.learning_rate))
    if tuning.low is not None and tuning.high is not None:
        best, default = decimal(tuning.best_samples_per_s, 3), decimal(tuning.baseline_samples_per_s, 3)
        interval = f"{tuning.low:.2f} × to {tuning.high:.2f} ×"
        speeds = f"{best} samples/s, the default {default}; 96 % interval {interval}"
        yield Fact("tuning", "speeds", speeds, "more")


def describe_tuning(tuning: Tuning) -> str:
    """Return the answer of the tuner, with the lower bound of its gain."""
    if tuning.low is None:
        return f"kept the default, {decimal(tuning.best_samples_per_s, 3)} samples/s in the trials"
    return f"at least {tuning.low:.2f} × faster: {knobs_in_words(tuning.changes, ' + ')}"


def describe_trial(trial: Trial, changes: Mapping[str, object]) -> str:
    """Describe a trial: ``bf16, channels-last: 24,372 samples/s (29 % faster)``."""
    what = knobs_in_words(changes) or "default"
    if trial.samples_per_s is None:
        return f"{what}: left out, {trial.note}"
    ratio = f" ({ratio_in_words(trial.relative)})" if changes and trial.relative is not None else ""
    return f"{what}: {decimal(trial.samples_per_s, 3)} samples/s{ratio}"


def _describe_rate(rate: LrTuning) -> str:
    """Describe the choice of the learning rate."""
    tried = f"{plural(rate.trials, 'learning rate')} tried in runs of {plural(rate.steps, 'step')}"
    if rate.best == rate.default:
        return f"kept {decimal(rate.default, 3)}: {tried}"
    best, default = (
        "no loss" if loss is None else f"loss {decimal(loss)}" for loss in (rate.best_loss, rate.default_loss)
    )
    return f"{decimal(rate.best, 3)} ({best}) instead of {decimal(rate.default, 3)} ({default}): {tried}"


def _training_facts(training: Training) -> Iterator[Fact]:
    yield Fact("training", "reached", describe_reached(training), "main")
    words = [plural(training.optimizer_steps, "step"), plural(training.samples, "sample")]
    if training.samples_per_s is not None:
        words.append(f"{decimal(training.samples_per_s, 3)} samples/s")
    if training.validation:  # otherwise the line above has the loss
        words.append(_describe_loss(training))
    if training.skipped_steps:
        words.append(f"{plural(training.skipped_steps, 'step')} skipped")
    if training.oom_recoveries:
        recoveries = plural(training.oom_recoveries, "recovery", "recoveries")
        words.append(f"{recoveries} from out of memory")
        if training.micro_batch is not None:
            words.append(f"micro-batch {count(training.micro_batch)} at the end")
    yield Fact("training", "trained", ", ".join(words))
    if training.ema is not None:
        weights = f"decay {training.ema:g}, exported to model-ema.safetensors"
        yield Fact("training", "averaged", weights, "more")
    yield Fact("training", "resumed from", training.resumed_from or "", "more")
    yield Fact("training", "checkpoint", training.checkpoint or "", "more")


def describe_reached(training: Training) -> str:
    """Describe what the training reached: the held-out figures, else the loss."""
    if not training.validation:
        return f"training {_describe_loss(training)}"
    whose = " of the averaged weights" if training.ema is not None else ""
    return f"held-out {', '.join(metrics_in_words(training.validation))}{whose}"


def _describe_loss(training: Training) -> str:
    if training.first_loss is None or training.final_loss is None:
        return "loss unknown"
    terms = terms_in_words(training.final_terms)
    return f"loss {training.first_loss:.4f} → {training.final_loss:.4f}{terms}"


def describe_estimate(estimate: Estimate) -> str:
    """Describe what is predicted to fit on a GPU."""
    budget = format_bytes(estimate.budget_bytes) + _on_each_rank(estimate.world_size, estimate.parallel)
    precision = "" if estimate.precision is None else f" ({estimate.precision})"
    if not estimate.fits:
        return f"{estimate.profile}: does not fit in {budget}{precision}"
    fits = f"{estimate.profile}: {count(estimate.micro_batch)} samples at a time in {budget}{precision}"
    if estimate.plan is None:
        return fits
    return f"{fits}, batch {count(estimate.plan.target_batch)} in {describe_split(estimate.plan)}"


def recorded_lines(recorded: Recorded) -> Sequence[str]:
    """Describe a program that was recorded: its peaks, and why memory ran out."""
    reserved, allocated = recorded.peak_reserved_bytes, recorded.peak_allocated_bytes
    gap, expandable = reserved - allocated, format_bytes(recorded.expandable_bytes)
    peaks = (
        f"peak reserved {format_bytes(reserved)}, allocated {format_bytes(allocated)}: {format_bytes(gap)} "
        f"between them ({gap / max(1, reserved):.0%}) are fragmentation"
    )
    if (refused := recorded.refused) is None:
        return peaks, f"expandable_segments:True would reserve {expandable}"
    unused = refused.reserved_bytes - refused.allocated_bytes
    largest = ""
    if refused.largest_free_bytes is not None:
        largest = f", at most {format_bytes(refused.largest_free_bytes)} in one piece"
    verdict = {
        "fragmented": "as much was free, but in pieces: fragmented",
        "limited": "the GPU had enough: a limit of the process held it back",
        "full": f"it lacked {format_bytes(refused.asked_bytes - unused - refused.device_free_bytes)}",
    }
    return (
        peaks,
        f"out of memory: asked for {format_bytes(refused.asked_bytes)}, and free were "
        f"{format_bytes(refused.device_free_bytes)} on the GPU and {format_bytes(unused)} of the "
        f"{format_bytes(refused.reserved_bytes)} that were reserved{largest}; {verdict[refused.reason]}",
        f"with that request it needs {format_bytes(recorded.needed_bytes)}, and {expandable} with "
        "expandable_segments:True, and more later",
    )
