"""Terminal output: progress during a run, and its result at the end.

A terminal shows progress as a live line. Otherwise the same facts are printed as a few plain lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self, TextIO

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table
from rich.text import Text

from autobatch.cli.summary import LIMITS, describe_plan, describe_tuning, summary_lines
from autobatch.core.progress import Progress
from autobatch.core.text import LONGEST_VALUE, printable
from autobatch.core.units import format_bytes
from autobatch.core.version import __version__

if TYPE_CHECKING:
    from autobatch.core.records import (
        Attempt,
        DeviceRecord,
        Estimate,
        Plan,
        Probe,
        StepRecord,
        Tuning,
    )
    from autobatch.report.result import Estimates, Result


PLAIN_LINES = 10
"""Lines of training progress if the output is no terminal."""
WIDEST = 400
"""Maximum width of the table of GPUs, in columns."""
TOP_MODULES = 5
"""Modules that an explanation names, those with the most activations."""


class Terminal(Progress):
    """Progress and result of a run as text.

    Args:
        stream: the stream to write to.
        quiet: whether to write the result only.
    """

    def __init__(self, stream: TextIO, *, quiet: bool = False) -> None:
        # Foreign text, for example the name of another user's process, must never be read as markup.
        self._console = Console(
            file=stream, highlight=False, markup=False, emoji=False, soft_wrap=not stream.isatty()
        )
        self._live = self._console.is_terminal and not quiet
        self._quiet = quiet
        self._stack = ExitStack()
        self._bar: ProgressBar | None = None
        self._status = self._console.status("") if self._live else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._idle()
        self._stack.close()

    def begin(self, workload: str | None, *, predicts: bool = False) -> None:
        """Print what is about to run. A command that only predicts does not use the budget of the demo."""
        if workload is not None:
            self._say(f"autobatch {__version__} · {workload}", style="bold")
            return
        self._say(f"autobatch {__version__} · the embedded demo (no workload was given)", style="bold")
        if not predicts:
            self._say("It trains on 1,797 handwritten digits. Its memory budget is small, so that the")
            self._say("batch needs accumulation; --memory-budget overrides it. To train your model:")
            self._say("autobatch fit train.py:workload --target-batch 1024")

    def note(self, text: str) -> None:
        """Print a remark."""
        self._say(f"note: {text}", style="dim")

    def opened(self, device: DeviceRecord) -> None:
        """Print the device and its budget."""
        table = Table.grid(padding=(0, 2))
        table.add_row("device", printable(f"{device.name} ({device.kind})"))
        table.add_row("total", format_bytes(device.total_bytes))
        table.add_row("budget", f"{format_bytes(device.budget_bytes)}: {printable(device.budget_source)}")
        if device.other_processes_bytes is not None:
            table.add_row("others", format_bytes(device.other_processes_bytes))
        for holder in device.holders:
            who = f"process {holder.pid}" if holder.pid is not None else "a process"
            name = printable(holder.name or "", limit=LONGEST_VALUE)
            table.add_row("", f"{who} {name}: {format_bytes(holder.used_bytes)}")
        if self._live:
            self._console.print(Panel(table, title="memory", title_align="left", border_style="dim"))
        else:
            for label, value in zip(*(column.cells for column in table.columns), strict=True):
                self._say(f"{label:<8}{value}")
        self._busy("probing …")

    def attempted(self, attempt: Attempt) -> None:
        """Print a micro-batch that ran."""
        peak = attempt.peak_reserved_bytes or attempt.peak_allocated_bytes
        verdict = "fits" if attempt.fits else "does not fit"
        self._say(
            f"probe   {attempt.micro_batch:>7,}  {verdict:<12}  peak {format_bytes(peak):>9}"
            f"  {attempt.seconds:6.2f} s"
        )

    def probed(self, probe: Probe) -> None:
        """Print the largest micro-batch, and what limits it."""
        if probe.source == "asked":
            return  # the attempt was printed already
        more = f"{probe.micro_batch + 1:,}"
        bound = {
            "run": f"{more} ran and does not fit",
            "replay": f"{more} does not fit, by replaying the runs",
            "cap": f"limited by {LIMITS[probe.limited_by]}",
            None: f"the {probe.stopped_by} ended the search, more may fit",
        }[probe.upper_bound_by]
        source = "" if probe.source == "search" else f", {probe.source}, confirmed by one run"
        largest = "micro-batch" if probe.stopped_by is not None else "largest micro-batch"
        self._say(f"{largest} {probe.micro_batch:,} ({bound}{source})", style="bold")

    def planned(self, plan: Plan) -> None:
        """Print the split of the batch."""
        self._say(f"plan    {describe_plan(plan)}")

    def measured(
        self, number: int, of: int, values: Mapping[str, object], samples_per_s: float, failure: str | None
    ) -> None:
        """Print a trial of the tuner."""
        choice = " ".join(f"{name}={value}" for name, value in values.items()) or "default"
        figure = f"left out: {failure}" if failure else f"{samples_per_s:,.0f} samples/s"
        self._say(f"trial   {number}/{of}  {choice}  {figure}")
        self._busy("tuning …")

    def tried_rate(
        self, number: int, of: int, learning_rate: float, loss: float | None, failure: str | None
    ) -> None:
        """Print a learning rate that was tried."""
        figure = f"left out: {failure}" if failure else f"loss {loss:.4g}"
        self._say(f"rate    {number}/{of}  {learning_rate:.3g}  {figure}")
        self._busy("trying learning rates …")

    def tuned(self, tuning: Tuning) -> None:
        """Print the choice of the tuner."""
        self._say(f"tuned   {describe_tuning(tuning)}", style="bold")

    def stepped(self, step: StepRecord, of: int) -> None:
        """Show a training step; without a terminal print about ten steps of the run."""
        if step.recovered is not None:
            self._say(
                f"step {step.step}: out of memory, repeated at micro-batch {step.micro_batch}: "
                f"{step.recovered}",
                style="yellow",
            )
        if not step.applied and step.count:
            self._say(f"step {step.step}: skipped, the loss or the gradient is not finite", style="yellow")
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
                ProgressBar(
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
        """Print the result, even if quiet."""
        self._idle()
        self._stack.close()
        for label, value in summary_lines(result):
            self._console.print(Text(printable(f"{label:<11}{value}")), soft_wrap=True)

    def estimated(self, estimates: Estimates) -> None:
        """Print what is predicted to fit, even if quiet."""
        self._idle()
        for line in estimates.notes:
            self.note(line)
        table = Table(box=None, pad_edge=False)
        for name, side in (("GPU", "left"), ("budget", "right"), ("micro-batch", "right")):
            table.add_column(name, justify=side, no_wrap=True)  # type: ignore[arg-type]
        for name in ("largest", "reserved", "precision", "steps"):
            table.add_column(name, justify="right", no_wrap=True)
        for one in estimates.estimates:
            table.add_row(
                printable(one.profile),
                format_bytes(one.budget_bytes),
                f"{one.micro_batch:,}" if one.fits else "does not fit",
                f"{one.micro_batch_low:,} to {one.micro_batch_high:,}",
                format_bytes(one.peak_reserved_bytes),
                one.precision,
                "" if one.plan is None else f"{one.plan.accumulation_steps:,}",
            )
        # A table wider than the terminal is better than figures that are cut off.
        needed = self._console.measure(table, options=self._console.options.update(max_width=WIDEST)).maximum
        wide = Console(
            file=self._console.file,
            width=max(self._console.width, needed),
            highlight=False,
            markup=False,
            emoji=False,
        )
        wide.print(table)
        if len(estimates.estimates) == 1:
            self._explain(estimates.estimates[0])

    def _explain(self, one: Estimate) -> None:
        """Print what uses the memory on one GPU, and what would help."""
        total = sum(one.memory.values())
        modules = [(f"  {name}", size) for name, size in list(one.modules.items())[:TOP_MODULES] if size]
        parts: list[tuple[str, int]] = []
        for kind, size in one.memory.items():
            parts += [(kind, size)] if size else []
            parts += modules if kind == "activations" else []
        at = f"memory at the peak of micro-batch {max(1, one.micro_batch):,}, phase {one.phase}"
        table = Table(box=None, pad_edge=False)
        table.add_column(at, overflow="fold")
        table.add_column("bytes", justify="right", no_wrap=True)
        table.add_column("share", justify="right", no_wrap=True)
        for name, size in parts:
            table.add_row(printable(name), format_bytes(size), f"{size / max(total, 1):.0%}")
        self._console.print()
        self._console.print(table)
        if one.remedies:
            self._console.print("\npredicted micro-batch with a change:")
        for remedy in one.remedies or ():
            figure = f"{remedy.micro_batch:,}" if remedy.micro_batch else "does not fit"
            line = f"  {figure:>7}  {remedy.advice} (peak {format_bytes(remedy.peak_bytes)})"
            self._console.print(Text(printable(line)), soft_wrap=True)

    def _say(self, text: str, style: str | None = None) -> None:
        if not self._quiet:
            self._console.print(Text(printable(text), style=style or ""))

    def _busy(self, what: str) -> None:
        if self._status is not None:
            self._status.update(what)
            self._status.start()

    def _idle(self) -> None:
        if self._status is not None:
            self._status.stop()
