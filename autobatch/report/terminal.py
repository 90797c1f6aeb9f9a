"""Terminal output: progress during a run, and its facts at the end.

A terminal shows the current act as a live line. Otherwise the same progress is printed as a few plain lines.
What fits, the plan and what was reached are printed once, at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from autobatch.core import __version__
from autobatch.core.progress import Progress
from autobatch.core.text import LONGEST_VALUE, one_line, printable
from autobatch.core.units import format_bytes, significant
from autobatch.report.facts import (
    describe_trial,
    device_facts,
    final_facts,
    metrics_in_words,
    peak_bytes,
    plural,
    terms_in_words,
)
from autobatch.report.tables import estimate_lines, folded

if TYPE_CHECKING:
    from autobatch.core.records import Attempt, DeviceRecord, LrTrial, StepRecord, Trial
    from autobatch.report.result import Estimates, Result


PLAIN_LINES = 10
"""Lines of training progress if the output is no terminal."""
LABEL = 11
"""Columns of the label of a fact."""
TIME = 12
"""Columns of the time of the live line."""


class Terminal(Progress):
    """Progress and result of a run as text.

    Args:
        stream: the stream to write to.
        quiet: whether to write the result only.
    """

    def __init__(self, stream: TextIO, *, quiet: bool = False) -> None:
        # Foreign text, for example the name of another user's process, must never be read as markup.
        self._console = Console(
            file=stream, highlight=False, markup=False, emoji=False, soft_wrap=not stream.isatty(),
            force_jupyter=False,
        )  # fmt: skip
        self._quiet = quiet
        self._width = self._console.width if self._console.is_terminal else None
        has_line = self._console.is_terminal and not self._console.is_dumb_terminal and not quiet
        self._line = LiveLine(self._console) if has_line else None
        self._steps: tuple[int, int | None] = 0, None
        """Steps done, and all steps; None before the training."""
        self._held_out = self._saved = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def begin(self, workload: str | None, *, predicts: bool = False) -> None:
        """Print what is about to run. A command that only predicts does not use the budget of the demo."""
        what = "the embedded demo (no workload was given)" if workload is None else workload
        self._say(f"autobatch {__version__} · {what}", style="bold")
        if workload is None and not predicts:
            self._say("It trains on 1,797 handwritten digits. Its memory budget is small: a large")
            self._say("batch needs accumulation. --memory-budget overrides it. To train your model:")
            self._say("autobatch fit train.py --target-batch 1024")

    def doing(self, act: str) -> None:
        """Show what happens from now on. Only a terminal shows it, which removes the line again."""
        if self._line is not None:
            self._line.show([printable(act)], *self._steps)

    def note(self, text: str) -> None:
        """Print a remark."""
        self._say(f"note: {one_line(text)}", style="dim")

    def opened(self, device: DeviceRecord) -> None:
        """Print the device and its budget."""
        for fact in device_facts(device):
            self._say(f"{fact.label:<8}{printable(fact.text, limit=LONGEST_VALUE)}")

    def attempted(self, attempt: Attempt) -> None:
        """Print a micro-batch that ran."""
        verdict = "fits" if attempt.fits else "fails" if attempt.is_error else "does not fit"
        size = peak_bytes(attempt)
        peak = "" if size is None else f"peak {format_bytes(size):>9}"
        self._say(f"probe   {attempt.micro_batch:>7,}  {verdict:<12}  {peak:<14}  {attempt.seconds:6.2f} s")

    def measured(self, trial: Trial, of: int, changes: Mapping[str, object]) -> None:
        """Print a trial of the tuner."""
        self._say(f"trial   {trial.number + 1}/{of}  {describe_trial(trial, changes)}")

    def tried_rate(self, trial: LrTrial, of: int) -> None:
        """Print a learning rate that was tried."""
        figure = f"left out, {trial.note}" if trial.note else f"loss {trial.loss:.4g}"
        self._say(f"rate    {trial.number + 1}/{of}  {trial.learning_rate:.3g}  {figure}")

    def saved(self, step: int) -> None:
        """Show the last checkpoint on the line of the training."""
        self._saved = f"saved {step:,}"

    def stepped(self, step: StepRecord, of: int) -> None:
        """Show a training step; without a live line print about ten steps of the run."""
        if not step.applied and step.count:
            self._say(f"step {step.step}: skipped, the loss or the gradient is not finite", style="yellow")
        loss = (
            "loss –" if step.loss is None else f"loss {significant(step.loss, 4)}{terms_in_words(step.terms)}"
        )
        speed = "" if step.samples_per_s is None else f"{step.samples_per_s:,.0f} samples/s"
        held_out = metrics_in_words(step.validation)
        if self._line is not None:
            self._held_out = f"held-out {held_out[0]}" if held_out else self._held_out
            self._steps = step.step, of
            recoveries = plural(step.oom_recoveries, "recovery", "recoveries") if step.oom_recoveries else ""
            peak = format_bytes(size) if (size := peak_bytes(step)) else ""
            figures = (loss, speed, recoveries, peak, self._held_out, self._saved)
            words = [f"training {step.step:,}/{of:,}", *map(printable, filter(None, figures))]
            self._line.show(words, *self._steps)
            return
        place = f"step    {step.step:>6,}/{of:,}"
        if step.step % max(1, of // PLAIN_LINES) == 0 or step.step == of:
            self._say(f"{place}  {loss}" + (speed and f"  {speed}"))
        if held_out:
            self._say(f"{place}  held-out {', '.join(held_out)}")

    def finish(self, result: Result) -> None:
        """Print the result, even if quiet: what fits, what was reached and where it is, then the details."""
        self._end()
        for fact in final_facts(result, out=result.out, report=result.report):
            line = f"{fact.label:<{LABEL}}{printable(fact.text)}"
            if fact.part != "files":  # a path or a command is copied whole
                line = "\n".join(folded(line, self._width, LABEL))
            style = "bold" if fact.kind == "main" else "dim"
            self._console.print(Text(line, style=style), soft_wrap=True)
        for text in result.notes:
            self.note(text)

    def estimated(self, estimates: Estimates) -> None:
        """Print what is predicted to fit, even if quiet."""
        self._end()
        for text in estimates.notes:
            self.note(text)
        found, width = estimates, self._width
        for line in estimate_lines(found.estimates, found.recorded, width):
            self._console.print(Text("\n".join(folded(printable(line), width, 4))), soft_wrap=True)

    def _say(self, text: str, style: str = "") -> None:
        if not self._quiet:
            self._console.print(Text(printable(text), style=style))

    def _end(self) -> None:
        if self._line is not None:
            self._line.end()
            self._line = None


class LiveLine:
    """The line at the bottom of a terminal; what is printed appears above it.

    Args:
        console: the terminal.
    """

    def __init__(self, console: Console) -> None:
        width = max(8, min(20, console.width // 5))
        self._room = console.width - width - TIME
        self._columns = BarColumn(bar_width=width), TextColumn("{task.description}", markup=False)
        # Each refresh takes a millisecond from what is measured.
        self._bar = Bar(
            *self._columns, TimeElapsedColumn(), console=console, transient=True, refresh_per_second=6
        )
        self._task = self._bar.add_task("", total=None)

    def show(self, words: Sequence[str], done: int = 0, total: int | None = None) -> None:
        """Show as many words as there is room for, and the time since the act began, or that is left.

        Args:
            words: what happens, and figures, the most important first.
            done: steps done.
            total: all steps; None if their number is unknown.
        """
        self._bar.start()
        text = words[0][: self._room]
        for word in words[1:]:
            if len(text) + len(word) + 3 > self._room:
                break
            text += f" · {word}"
        if total is None:
            self._bar.reset(self._task, description=text)
            self._bar.refresh()
            return
        if self._bar.tasks[0].total is None:
            self._bar.columns = (*self._columns, TimeRemainingColumn(compact=True), TextColumn("left"))
            self._bar.reset(self._task, completed=done, total=total)
        # An act has no figures. Even one that ends at once has been on the screen.
        self._bar.update(self._task, description=text, completed=done, refresh=len(words) == 1)

    def end(self) -> None:
        """Remove the line."""
        self._bar.stop()
