"""Terminal output: progress during a run, and its facts at the end.

A terminal shows the current act as a live line. Otherwise the same progress is printed as a few plain lines.
What fits, the plan and what was reached are printed once, at the end.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.style import Style
from rich.table import Table
from rich.text import Text

from autobatch.core.progress import Progress
from autobatch.core.text import LONGEST_VALUE, printable
from autobatch.core.units import format_bytes
from autobatch.core.version import __version__
from autobatch.report import tables
from autobatch.report.facts import (
    Fact,
    describe_estimate,
    describe_trial,
    device_facts,
    final_facts,
    peak_bytes,
    recorded_lines,
)
from autobatch.report.words import metrics_in_words, plural, terms_in_words

if TYPE_CHECKING:
    from autobatch.core.records import Attempt, DeviceRecord, StepRecord, Trial
    from autobatch.report.result import Estimates, Result


PLAIN_LINES = 10
"""Lines of training progress if the output is no terminal."""
LABEL = 11
"""Columns of the label of a fact."""
TIME = 12
"""Columns of the time of the live line."""
SHOWN_EVERY_S = 0.2
"""Seconds between two steps that a notebook shows."""
WIDEST = 400
"""Columns up to which a table is measured."""


class Terminal(Progress):
    """Progress and result of a run as text.

    Args:
        stream: the stream to write to.
        quiet: whether to write the result only.
        is_notebook: whether the stream ends in a cell of a notebook.
    """

    def __init__(self, stream: TextIO, *, quiet: bool = False, is_notebook: bool = False) -> None:
        # Foreign text, for example the name of another user's process, must never be read as markup.
        self._console = Console(
            file=stream, highlight=False, markup=False, emoji=False, soft_wrap=not stream.isatty()
        )
        self._quiet = quiet
        self._line: LiveLine | NotebookLine | None = None
        if is_notebook:
            self._line = NotebookLine()
        elif self._console.is_terminal and not self._console.is_dumb_terminal and not quiet:
            self._line = LiveLine(self._console)
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
        elif self._console.is_dumb_terminal:
            self._say(f"… {act}")

    def note(self, text: str) -> None:
        """Print a remark."""
        self._say(f"note: {text}", style="dim")

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

    def tried_rate(
        self, number: int, of: int, learning_rate: float, loss: float | None, failure: str | None
    ) -> None:
        """Print a learning rate that was tried."""
        figure = f"left out, {failure}" if failure else f"loss {loss:.4g}"
        self._say(f"rate    {number}/{of}  {learning_rate:.3g}  {figure}")

    def saved(self, step: int) -> None:
        """Show the last checkpoint on the line of the training."""
        self._saved = f"saved {step:,}"

    def stepped(self, step: StepRecord, of: int) -> None:
        """Show a training step; without a live line print about ten steps of the run."""
        if not step.applied and step.count:
            self._say(f"step {step.step}: skipped, the loss or the gradient is not finite", style="yellow")
        loss = "loss –" if step.loss is None else f"loss {step.loss:.4f}{terms_in_words(step.terms)}"
        speed = "" if step.samples_per_s is None else f"{step.samples_per_s:,.0f} samples/s"
        held_out = metrics_in_words(step.validation)
        if self._line is not None:
            self._held_out = f"held-out {held_out[0]}" if held_out else self._held_out
            self._steps = step.step, of
            recoveries = plural(step.oom_recoveries, "recovery", "recoveries") if step.oom_recoveries else ""
            peak = format_bytes(peak_bytes(step) or 0) if peak_bytes(step) else ""
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
            self._print_fact(fact)
        for text in result.notes:
            self.note(text)

    def estimated(self, estimates: Estimates) -> None:
        """Print what is predicted to fit, even if quiet."""
        self._end()
        for line in estimates.notes:
            self.note(line)
        if estimates.notes and self._console.is_terminal:
            self._say("")
        if estimates.recorded is not None:
            self._print_lines(recorded_lines(estimates.recorded))
            self._print_tables(tables.recorded_tables(estimates.recorded))
            return
        table = tables.gpu_table(estimates.estimates)
        widest = self._console.options.update(max_width=WIDEST)
        width = self._console.measure(self._grid(table), options=widest).maximum
        if width > self._console.width and self._console.is_terminal:
            self._print_lines(map(describe_estimate, estimates.estimates))
        else:
            self._print_table(table)
        if estimates.over_ranks:
            of_ranks = tables.rank_table(estimates.over_ranks)
            self._print_lines(["", f"{of_ranks.caption}:"])
            self._print_table(of_ranks)
        if len(estimates.estimates) == 1:
            self._print_tables([tables.memory_table(estimates.estimates[0])])
        for estimate in estimates.estimates:
            if estimate.remedies and (len(estimates.estimates) == 1 or not estimate.fits):
                on = "" if len(estimates.estimates) == 1 else f" on {estimate.profile}"
                self._print_lines(["", f"predicted micro-batch{on} with a change:"])
                self._print_lines(tables.remedy_lines(estimate))

    def _print_lines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._console.print(Text(printable(line)))

    def _print_tables(self, several: Iterable[tables.Table]) -> None:
        for table in several:
            self._console.print()
            self._print_table(table)

    def _print_table(self, table: tables.Table) -> None:
        """Print a table, in a pipe with tabs between the cells."""
        if self._console.is_terminal:
            self._console.print(self._grid(table))
            return
        for row in (table.head, *table.rows):
            self._console.file.write("\t".join(map(printable, row)) + "\n")  # rich expands tabs

    def _grid(self, table: tables.Table) -> Table:
        grid = Table(box=None, pad_edge=False)
        for number, name in enumerate(table.head):
            grid.add_column(printable(name), justify="right" if number else "left", overflow="fold")
        for row in table.rows:
            grid.add_row(*map(printable, row))
        return grid

    def _print_fact(self, fact: Fact) -> None:
        """Print a fact; a long text continues below its beginning, and a path is a link."""
        style = Style(bold=fact.kind == "main", dim=fact.kind != "main")
        label = Text(f"{fact.label:<{LABEL}}", style=style)
        if not self._console.is_terminal:
            self._console.print(label + Text(printable(fact.text)))
        elif fact.kind == "path" or fact.label == "run again":
            # A path or a command that is broken into lines cannot be copied.
            link = Style(link=Path(fact.text).absolute().as_uri()) if fact.kind == "path" else Style()
            self._console.print(label + Text(printable(fact.text), style=style + link), soft_wrap=True)
        else:
            grid = Table.grid()
            grid.add_column(width=LABEL)
            grid.add_column(overflow="fold")
            grid.add_row(label, Text(printable(fact.text), style=style))
            self._console.print(grid)

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


class NotebookLine:
    """The line of a notebook cell, with a bar that the browser draws; it needs no widgets."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown_at = 0.0
        self._begin: tuple[int, float] | None = None
        """The first step that was shown, and its time."""

    def show(self, words: Sequence[str], done: int = 0, total: int | None = None) -> None:
        """Show words; a step of a training is left out if one has just been shown.

        Args:
            words: what happens, and figures.
            done: steps done.
            total: all steps; None if their number is unknown.
        """
        now, size, left = time.monotonic(), "", []
        if total is not None:
            if done < total and now - self._shown_at < SHOWN_EVERY_S:
                return
            size = f'value="{done}" max="{total}" '
            self._begin = first, since = self._begin or (done, now)
            left = [f"{(now - since) / (done - first) * (total - done):,.0f} s left"] if done > first else []
        self._shown_at, text = now, " · ".join([*words, *left])
        style = 'style="width: 20em; vertical-align: middle"'
        html = f"<progress {size}{style}></progress> {escape(text)}"
        self._update({"text/plain": text, "text/html": html})

    def end(self) -> None:
        """Remove the line."""
        if self._handle is not None:
            self._update({"text/plain": "", "text/html": ""})

    def _update(self, content: dict[str, str]) -> None:
        if self._handle is None:
            self._handle = import_module("IPython.display").display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)
