"""The terminal: what is going on, and at the end what came of it.

On a terminal a live line shows progress; piped, the same facts are plain lines, few enough to read.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self, TextIO

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from autobatch.core.units import format_bytes
from autobatch.core.version import __version__

if TYPE_CHECKING:
    from autobatch.core.records import (
        Attempt,
        DeviceRecord,
        Estimate,
        LrTuning,
        Plan,
        Probe,
        StepRecord,
        Training,
        Tuning,
    )
    from autobatch.report.result import Estimates, Result


PLAIN_LINES = 10
"""Lines that a piped training run writes."""


WIDEST = 400
"""Columns that a table of cards may take."""


LIMITS = {
    "memory": "memory",
    "target_batch": "the target batch",
    "dataset": "the samples that there are",
    "max_micro_batch": "--max-micro-batch",
}
"""What limits a micro-batch, in words."""


TOP_MODULES = 5
"""Modules with the most activations that an explanation names."""


class Terminal:
    """Tells a person what happens; a `autobatch.core.progress.Progress`.

    Args:
        stream: where to write.
        quiet: only the result.
    """

    def __init__(self, stream: TextIO, *, quiet: bool = False) -> None:
        self._console = Console(file=stream, highlight=False, soft_wrap=not stream.isatty())
        self._live = self._console.is_terminal and not quiet
        self._quiet = quiet
        self._stack = ExitStack()
        self._bar: Progress | None = None
        self._status = self._console.status("") if self._live else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._idle()
        self._stack.close()

    def begin(self, workload: str | None, *, predicts: bool = False) -> None:
        """Say what is about to run; what only predicts has no use for the demo's small budget."""
        if workload is not None:
            self._say(f"autobatch {__version__} · {workload}", style="bold")
            return
        self._say(f"autobatch {__version__} · the embedded demo: no workload was named", style="bold")
        if not predicts:
            self._say("1,797 real handwritten digits, in a small memory budget of the demo's own, so")
            self._say("that the batch accumulates; --memory-budget overrides it. To train yours:")
            self._say("autobatch fit train.py:workload --target-batch 1024")

    def note(self, text: str) -> None:
        """See `autobatch.core.progress.Progress`."""
        self._say(f"note: {text}", style="dim")

    def opened(self, device: DeviceRecord) -> None:
        """See `autobatch.core.progress.Progress`."""
        table = Table.grid(padding=(0, 2))
        table.add_row("device", f"{device.name} ({device.kind})")
        table.add_row("total", format_bytes(device.total_bytes))
        table.add_row("budget", f"{format_bytes(device.budget_bytes)}: {device.budget_source}")
        if device.other_processes_bytes is not None:
            table.add_row("others", format_bytes(device.other_processes_bytes))
        for holder in device.holders:
            who = f"process {holder.pid}" if holder.pid is not None else "a process"
            table.add_row("", f"{who} {holder.name or ''}: {format_bytes(holder.used_bytes)}")
        if self._live:
            self._console.print(Panel(table, title="memory", title_align="left", border_style="dim"))
        else:
            for label, value in zip(*(column.cells for column in table.columns), strict=True):
                self._say(f"{label:<8}{value}")
        self._busy("probing …")

    def attempted(self, attempt: Attempt) -> None:
        """See `autobatch.core.progress.Progress`."""
        peak = attempt.peak_reserved_bytes or attempt.peak_allocated_bytes
        verdict = "fits" if attempt.fits else "does not fit"
        self._say(
            f"probe   {attempt.micro_batch:>7,}  {verdict:<12}  peak {format_bytes(peak):>9}"
            f"  {attempt.seconds:6.2f} s"
        )

    def probed(self, probe: Probe) -> None:
        """See `autobatch.core.progress.Progress`."""
        if probe.source == "asked":
            return  # the attempt has said it
        bound = {
            "run": "one more was run and does not fit",
            "replay": "one more does not fit: replayed from runs",
            "cap": f"capped by {LIMITS[probe.limited_by]}",
            None: f"the search was ended by the {probe.stopped_by}: more may fit",
        }[probe.upper_bound_by]
        source = "" if probe.source == "search" else f", {probe.source}, confirmed"
        largest = "micro-batch" if probe.stopped_by is not None else "largest micro-batch"
        self._say(f"{largest} {probe.micro_batch:,} ({bound}{source})", style="bold")

    def planned(self, plan: Plan) -> None:
        """See `autobatch.core.progress.Progress`."""
        self._say(f"plan    {describe_plan(plan)}")

    def measured(
        self, number: int, of: int, values: Mapping[str, object], samples_per_s: float, failure: str | None
    ) -> None:
        """See `autobatch.core.progress.Progress`."""
        choice = " ".join(f"{name}={value}" for name, value in values.items()) or "default"
        figure = f"left out: {failure}" if failure else f"{samples_per_s:,.0f} samples/s"
        self._say(f"trial   {number}/{of}  {choice}  {figure}")
        self._busy("tuning …")

    def tried_rate(
        self, number: int, of: int, learning_rate: float, loss: float | None, failure: str | None
    ) -> None:
        """See `autobatch.core.progress.Progress`."""
        figure = f"left out: {failure}" if failure else f"loss {loss:.4g}"
        self._say(f"rate    {number}/{of}  {learning_rate:.3g}  {figure}")
        self._busy("trying learning rates …")

    def tuned(self, tuning: Tuning) -> None:
        """See `autobatch.core.progress.Progress`."""
        self._say(f"tuned   {describe_tuning(tuning)}", style="bold")

    def stepped(self, step: StepRecord, of: int) -> None:
        """See `autobatch.core.progress.Progress`."""
        if step.recovered is not None:
            self._say(
                f"step {step.step}: out of memory, run again at a micro-batch of {step.micro_batch}: "
                f"{step.recovered}",
                style="yellow",
            )
        if not step.applied and step.count:
            self._say(f"step {step.step}: not finite, no optimizer step was taken", style="yellow")
        loss = "–" if step.loss is None else f"{step.loss:.4f}"
        if not self._live:
            stride = max(1, of // PLAIN_LINES)
            if step.step % stride == 0 or step.step == of:
                rate = "" if step.samples_per_s is None else f"  {step.samples_per_s:,.0f} samples/s"
                self._say(f"step    {step.step:>6,}/{of:,}  loss {loss}{rate}")
            return
        self._idle()
        if self._bar is None:
            self._bar = self._stack.enter_context(
                Progress(
                    TextColumn("train"),
                    BarColumn(),
                    MofNCompleteColumn(),
                    TextColumn("{task.fields[loss]}"),
                    TimeRemainingColumn(),
                    console=self._console,
                )
            )
            self._bar.add_task("train", total=of, loss="")
        self._bar.update(self._bar.task_ids[0], completed=step.step, loss=f"loss {loss}")

    def finish(self, result: Result) -> None:
        """Say what came of it; always, quiet or not."""
        self._idle()
        self._stack.close()
        for label, value in summary(result):
            self._console.print(Text(f"{label:<11}{value}"), soft_wrap=True)

    def estimated(self, estimates: Estimates) -> None:
        """Say what is predicted to fit; always, quiet or not."""
        self._idle()
        for line in estimates.notes:
            self.note(line)
        table = Table(box=None, pad_edge=False)
        for name, side in (("card", "left"), ("budget", "right"), ("micro-batch", "right")):
            table.add_column(name, justify=side, no_wrap=True)  # type: ignore[arg-type]
        for name in ("largest", "reserved", "precision", "steps"):
            table.add_column(name, justify="right", no_wrap=True)
        for one in estimates.estimates:
            table.add_row(
                one.profile,
                format_bytes(one.budget_bytes),
                f"{one.micro_batch:,}" if one.fits else "does not fit",
                f"{one.micro_batch_low:,} to {one.micro_batch_high:,}",
                format_bytes(one.peak_reserved_bytes),
                one.precision,
                "" if one.plan is None else f"{one.plan.accumulation_steps:,}",
            )
        # Rather wider than the terminal than with figures cut off.
        needed = self._console.measure(table, options=self._console.options.update(max_width=WIDEST)).maximum
        wide = Console(file=self._console.file, width=max(self._console.width, needed), highlight=False)
        wide.print(table)
        if len(estimates.estimates) == 1:
            self._explain(estimates.estimates[0])

    def _explain(self, one: Estimate) -> None:
        """Say where the memory goes on one card, and what would help."""
        total = sum(one.memory.values())
        modules = [(f"  {name}", size) for name, size in list(one.modules.items())[:TOP_MODULES] if size]
        parts: list[tuple[str, int]] = []
        for kind, size in one.memory.items():
            parts += [(kind, size)] if size else []
            parts += modules if kind == "activations" else []
        at = f"memory of tensors at the peak of {max(1, one.micro_batch):,}, in the {one.phase}"
        table = Table(box=None, pad_edge=False)
        table.add_column(at, overflow="fold")
        table.add_column("bytes", justify="right", no_wrap=True)
        table.add_column("share", justify="right", no_wrap=True)
        for name, size in parts:
            table.add_row(Text(name), format_bytes(size), f"{size / max(total, 1):.0%}")
        self._console.print()
        self._console.print(table)
        if one.remedies:
            self._console.print("\nwhat would help, as traced:")
        for remedy in one.remedies or ():
            figure = f"{remedy.micro_batch:,}" if remedy.micro_batch else "does not fit"
            line = f"  {figure:>7}  {remedy.advice} (peak {format_bytes(remedy.peak_bytes)})"
            self._console.print(Text(line), soft_wrap=True)

    def _say(self, text: str, style: str | None = None) -> None:
        if not self._quiet:
            self._console.print(Text(text, style=style or ""))

    def _busy(self, what: str) -> None:
        if self._status is not None:
            self._status.update(what)
            self._status.start()

    def _idle(self) -> None:
        if self._status is not None:
            self._status.stop()


def describe_probe(probe: Probe) -> tuple[str, str]:
    """What fits: a label, and the size."""
    size = f"micro-batch {probe.micro_batch:,}"
    if probe.source == "asked":
        return "fits", size
    if probe.stopped_by is not None:
        return "fits", f"{size}; more may: the search was ended by the {probe.stopped_by}"
    return "largest", f"{size}, by {LIMITS[probe.limited_by]}"


def describe_plan(plan: Plan) -> str:
    """The split in words: ``1024 = 4 × 86 + 8 × 85, …``."""
    sizes = plan.micro_batches
    parts = [f"{sizes.count(size)} × {size}" for size in sorted(set(sizes), reverse=True)]
    ranks = f" on each of {plan.world_size} ranks" if plan.world_size > 1 else ""
    rate = f"learning rate {plan.learning_rate:.3g}"
    if plan.learning_rate_rule == "tuned":
        rate += f" (tuned, × {plan.learning_rate_factor:.3g})"
    elif plan.learning_rate_rule != "none":
        rate += f" ({plan.learning_rate_rule} rule, × {plan.learning_rate_factor:.3g})"
    knobs = "".join(f", {name} {value}" for name, value in plan.knobs.items())
    return f"{plan.target_batch:,} = {' + '.join(parts)}{ranks}, {plan.precision}{knobs}, {rate}"


def describe_tuning(tuning: Tuning) -> str:
    """The gain in words."""
    if not tuning.best_samples_per_s:
        return "the default stays: it was not measured"
    if tuning.best_samples_per_s <= tuning.baseline_samples_per_s or not tuning.baseline_samples_per_s:
        return f"the default stays, at {tuning.best_samples_per_s:,.0f} samples/s: nothing was faster"
    gain = tuning.best_samples_per_s / tuning.baseline_samples_per_s
    return (
        f"{tuning.best_samples_per_s:,.0f} samples/s, {gain:.2f} × the default's "
        f"{tuning.baseline_samples_per_s:,.0f}"
    )


def describe_rate(found: LrTuning) -> str:
    """What was found of the learning rate, in words."""
    tried = f"{found.trials} tried in runs of {found.steps:,} steps"
    if found.best == found.default:
        return f"{found.default:.3g} stays: {tried}"
    loss = "no loss" if found.default_loss is None else f"loss {found.default_loss:.4g}"
    return f"{found.best:.3g}, loss {found.best_loss:.4g}, for {found.default:.3g}, {loss}: {tried}"


def describe_training(training: Training) -> str:
    """What was trained, in words."""
    whose = "held-out" if training.ema is None else "averaged weights' held-out"
    held_out = "".join(
        f", {whose} {name} {_held_out(name, value)}" for name, value in training.validation.items()
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


def _held_out(name: str, value: float | None) -> str:
    if value is None:
        return "not finite"
    return f"{value:.2%}" if "acc" in name and 0 <= value <= 1 else f"{value:.4f}"


def summary(result: Result) -> list[tuple[str, str]]:
    """The final lines: label and text; the last is the command that repeats the call."""
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
    for label in ("report", "profile"):
        path = getattr(result, label)
        if path is not None:
            lines.append((label, str(path)))
    if result.command:
        lines.append(("again", result.command))
    return lines
