"""Terminal output: progress during a run, and its facts at the end.

A terminal shows the current act as a live line. Otherwise the same progress is printed as a few plain lines.
What fits, the plan and what was reached are printed once, at the end.
"""

from __future__ import annotations

import html
import textwrap
import time
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

import rich.progress as bars
from rich.console import Console
from rich.panel import Panel
from rich.style import Style
from rich.table import Table
from rich.text import Text

from autobatch.core.progress import Progress
from autobatch.core.text import LONGEST_VALUE, encodable, printable
from autobatch.core.units import format_bytes
from autobatch.core.version import __version__
from autobatch.report import tables
from autobatch.report.facts import Fact, describe_trial, device_facts, final_facts, peak_bytes, recorded_lines
from autobatch.report.words import knobs_in_words, metrics_in_words, plural, ratio_in_words, terms_in_words

if TYPE_CHECKING:
    from rich.console import RenderableType

    from autobatch.core.records import Attempt, DeviceRecord, Estimate, StepRecord, Trial
    from autobatch.report.result import Estimates, Result


PLAIN_LINES = 10
"""Lines of training progress if the output is no terminal."""
WIDEST = 400
"""Maximum width of the table of GPUs, in columns."""
NARROW = 70
"""Columns below which a frame would wrap."""
LABEL = 11
"""Columns of the label of a fact."""
FIXED_COLUMNS = 30
"""Columns of the training line besides its figures and its bar."""
ACT_COLUMNS = 15
"""Columns of the line of an act besides its text: the spinner and the time."""
REFRESHES = 6
"""Refreshes per second; each takes a millisecond from what is measured."""
WIDEST_BAR, NARROWEST_BAR = 30, 8


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
        is_live = self._console.is_terminal and not self._console.is_dumb_terminal and not quiet
        line = NotebookLine if is_notebook else LiveLine
        self._live = line(self._console) if is_notebook or is_live else None
        self._best: Trial | None = None
        self._best_words = ""

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def begin(self, workload: str | None, *, predicts: bool = False) -> None:
        """Print what is about to run. A command that only predicts does not use the budget of the demo."""
        if workload is not None:
            self._say(f"autobatch {__version__} · {workload}", style="bold")
            return
        self._say(f"autobatch {__version__} · the embedded demo (no workload was given)", style="bold")
        if not predicts:
            self._say("It trains on 1,797 handwritten digits. Its memory budget is small: a large")
            self._say("batch needs accumulation. --memory-budget overrides it. To train your model:")
            self._say("autobatch fit train.py --target-batch 1024")

    def doing(self, act: str) -> None:
        """Show what happens from now on. Only a terminal shows it, which removes the line again."""
        if self._live is not None:
            self._live.act(act, self._best_words if act.startswith(("trial", "comparing")) else "")
        elif self._console.is_dumb_terminal and not self._quiet:
            self._say(f"… {act}")

    def note(self, text: str) -> None:
        """Print a remark."""
        self._say(f"note: {text}", style="dim")

    def opened(self, device: DeviceRecord) -> None:
        """Print the device and its budget."""
        rows = [(fact.label, printable(fact.text, limit=LONGEST_VALUE)) for fact in device_facts(device)]
        if self._live is None or self._console.width < NARROW:
            for label, value in rows:
                self._say(f"{label:<8}{value}")
            return
        table = Table.grid(padding=(0, 2))
        for label, value in rows:
            table.add_row(*(self._shown(cell) for cell in (label, value)))
        self._console.print(Panel(table, title="memory", title_align="left", border_style="dim"))

    def attempted(self, attempt: Attempt) -> None:
        """Print a micro-batch that ran."""
        verdict = "fits" if attempt.fits else "fails" if attempt.is_error else "does not fit"
        size = peak_bytes(attempt)
        peak = "" if size is None else f"peak {format_bytes(size):>9}"
        self._say(f"probe   {attempt.micro_batch:>7,}  {verdict:<12}  {peak:<14}  {attempt.seconds:6.2f} s")

    def measured(self, trial: Trial, of: int, changes: Mapping[str, object]) -> None:
        """Print a trial of the tuner."""
        self._say(f"trial   {trial.number + 1}/{of}  {describe_trial(trial, changes)}")
        if trial.is_faster:
            ratio = ratio_in_words(trial.relative or 1.0)
            self._best_words = f"best so far {ratio}: {knobs_in_words(changes)}"

    def tried_rate(
        self, number: int, of: int, learning_rate: float, loss: float | None, failure: str | None
    ) -> None:
        """Print a learning rate that was tried."""
        figure = f"left out, {failure}" if failure else f"loss {loss:.4g}"
        self._say(f"rate    {number}/{of}  {learning_rate:.3g}  {figure}")

    def saved(self, step: int) -> None:
        """Show the last checkpoint on the line of the training."""
        if self._live is not None:
            self._live.save(step)

    def stepped(self, step: StepRecord, of: int) -> None:
        """Show a training step; without a live line print about ten steps of the run."""
        if not step.applied and step.count:
            self._say(f"step {step.step}: skipped, the loss or the gradient is not finite", style="yellow")
        if self._live is not None:
            self._live.train(step, of)
            return
        stride = max(1, of // PLAIN_LINES)
        if step.step % stride == 0 or step.step == of:
            loss = "–" if step.loss is None else f"{step.loss:.4f}{terms_in_words(step.terms)}"
            rate = "" if step.samples_per_s is None else f"  {step.samples_per_s:,.0f} samples/s"
            self._say(f"step    {step.step:>6,}/{of:,}  loss {loss}{rate}")
        if step.validation:
            held_out = ", ".join(metrics_in_words(step.validation))
            self._say(f"step    {step.step:>6,}/{of:,}  held-out {held_out}")

    def finish(self, result: Result) -> None:
        """Print the result, even if quiet: what fits, what was reached and where it is, then the details."""
        self._end()
        for fact in final_facts(result, out=result.out, report=result.report):
            self._print_fact(fact)

    def estimated(self, estimates: Estimates) -> None:
        """Print what is predicted to fit, even if quiet."""
        self._end()
        for line in estimates.notes:
            self.note(line)
        if estimates.notes and self._console.is_terminal:
            self._say("")
        if estimates.recorded is not None:
            self._print_lines(recorded_lines(estimates.recorded))
            for table in tables.recorded_tables(estimates.recorded):
                self._console.print()
                self._print_table(table, wraps=True)
            return
        self._print_table(tables.gpu_table(estimates.estimates))
        if estimates.over_ranks:
            of_ranks = tables.rank_table(estimates.over_ranks)
            self._console.print(f"\n{of_ranks.caption}:")
            self._print_table(of_ranks)
        if len(estimates.estimates) == 1:
            one = estimates.estimates[0]
            self._console.print()
            self._print_table(tables.memory_table(one), wraps=True)
            self._print_remedies(one, "")
            return
        for one in estimates.estimates:
            if not one.fits:
                self._print_remedies(one, f" on {printable(one.profile)}")

    def timed(self, lines: Iterable[str]) -> None:
        """Print how long the parts of the run took, even if quiet."""
        self._console.print("\nhow long each part took:")
        self._print_lines(lines)

    def _print_remedies(self, one: Estimate, where: str) -> None:
        if one.remedies:
            self._console.print(f"\npredicted micro-batch{where} with a change:")
        self._print_lines(tables.remedy_lines(one))

    def _print_lines(self, lines: Iterable[str]) -> None:
        """Print lines; on a terminal a long one continues, between words, below its beginning."""
        width = self._console.width
        is_narrow = width < NARROW
        indent = " " * (3 if is_narrow else LABEL)
        for line in map(self._shown, lines):
            text = line.lstrip() if is_narrow else line
            parts = textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False)
            self._console.print(Text("\n".join(parts) if self._console.is_terminal else line), soft_wrap=True)

    def _print_table(self, table: tables.Table, *, wraps: bool = False) -> None:
        """Print a table, in a pipe with tabs between the cells, each row as a list where it is too wide.

        Args:
            table: the table.
            wraps: whether the first column may be broken into lines.
        """
        if not self._console.is_terminal:
            for row in (table.head, *table.rows):
                self._console.file.write("\t".join(map(self._shown, row)) + "\n")  # rich expands tabs
            return
        grid = self._grid(table, wraps=wraps)
        widest = self._console.options.update(max_width=WIDEST)
        if wraps or self._console.measure(grid, options=widest).maximum <= self._console.width:
            self._console.print(grid)
            return
        for first, *cells in table.rows:
            self._console.print(Text(self._shown(first), style="bold"), soft_wrap=True)
            for name, cell in zip(table.head[1:], cells, strict=True):
                self._console.print(Text(self._shown(f"  {name:<12} {cell}")))

    def _grid(self, table: tables.Table, *, wraps: bool) -> Table:
        grid = Table(box=None, pad_edge=False)
        for number, name in enumerate(table.head):
            is_first = number == 0
            grid.add_column(
                self._shown(name),
                justify="left" if is_first else "right",
                no_wrap=not (is_first and wraps),
                overflow="fold",
            )
        for row in table.rows:
            grid.add_row(*map(self._shown, row))
        return grid

    def _print_fact(self, fact: Fact) -> None:
        """Print a fact; a long text continues below its beginning, and a path is a link."""
        style = Style.parse("bold" if fact.kind == "main" else "dim")
        if fact.kind == "path" and self._console.is_terminal:
            style += Style(link=Path(fact.text).absolute().as_uri())
        text = Text(self._shown(fact.text), style=style)
        label = Text(f"{fact.label:<{LABEL}}", style="bold" if fact.kind == "main" else "dim")
        is_one_word = fact.kind == "path" or fact.label == "run again"
        if is_one_word or not self._console.is_terminal:
            # A path or a command that is broken into lines cannot be copied.
            self._console.print(label + text, soft_wrap=True)
            return
        grid = Table.grid()
        grid.add_column(width=LABEL)
        grid.add_column(overflow="fold")
        grid.add_row(label, text)
        self._console.print(grid)

    def _say(self, text: str, style: str | None = None) -> None:
        if not self._quiet:
            self._console.print(Text(self._shown(text), style=style or ""))

    def _shown(self, text: str) -> str:
        return encodable(printable(text), self._console.encoding)

    def _end(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


class LiveLine:
    """The line at the bottom of a terminal; what is printed appears above it.

    Args:
        console: the terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._encoding = console.encoding
        is_utf = console.encoding.lower().startswith("utf")
        self._bar = bars.Progress(
            bars.SpinnerColumn("dots" if is_utf else "line", style="cyan"),
            bars.TextColumn("{task.description}", markup=False),
            _OnlyWithTotal(bars.BarColumn(bar_width=_bar_width(console.width))),
            _OnlyWithTotal(bars.MofNCompleteColumn()),
            bars.TextColumn("{task.fields[facts]}", markup=False, style="dim"),
            _Time(),
            console=console,
            transient=True,
            refresh_per_second=REFRESHES,
        )
        self._task = self._bar.add_task("", total=None, facts="")
        self._held_out = ""
        self._saved = ""

    def start(self) -> None:
        """Show the line."""
        self._bar.start()

    def stop(self) -> None:
        """Remove the line."""
        self._bar.stop()

    def act(self, text: str, facts: str = "") -> None:
        """Show what happens from now on, and for how long."""
        task = self._bar.tasks[0]
        if task.total is not None:  # the bar of the training stays, and only its name changes
            self._bar.update(self._task, description=self._shown(text), refresh=True)
            return
        room = self._console.width - ACT_COLUMNS
        text, facts = self._shown(text)[:room], self._shown(facts)
        if len(text) + len(facts) > room:
            facts = ""
        self._bar.reset(self._task, total=None, description=text, facts=facts)
        self._bar.refresh()  # even an act that ends at once has been on the screen

    def save(self, step: int) -> None:
        """Keep the step of the last checkpoint, to show it."""
        self._saved = f"saved {step:,}"

    def train(self, step: StepRecord, of: int) -> None:
        """Show a training step."""
        if step.validation:
            self._held_out = f"held-out {metrics_in_words(step.validation)[0]}"
        if self._bar.tasks[0].total is None:
            self._bar.reset(self._task, total=of, completed=step.step - 1)
        self._bar.update(
            self._task, completed=step.step, description="training", facts=self._shown(self._facts(step))
        )

    def _facts(self, step: StepRecord) -> str:
        """Return as many figures of a step as the line has room for, the most important first."""
        peak = peak_bytes(step)
        figures = [
            "" if step.loss is None else f"loss {step.loss:.4f}{terms_in_words(step.terms)}",
            "" if step.samples_per_s is None else f"{step.samples_per_s:,.0f} samples/s",
            plural(step.oom_recoveries, "recovery", "recoveries") if step.oom_recoveries else "",
            "" if peak is None else format_bytes(peak),
            self._held_out,
            self._saved,
        ]
        room = self._console.width - FIXED_COLUMNS - _bar_width(self._console.width)
        text = ""
        for figure in filter(None, figures):
            longer = f"{text} · {figure}" if text else figure
            if text and len(longer) > room:
                break
            text = longer
        return text

    def _shown(self, text: str) -> str:
        return encodable(printable(text), self._encoding)


class NotebookLine(LiveLine):
    """The line of a notebook cell, with a bar that the browser draws; it needs no widgets.

    The bar of a training stays in the cell.

    Args:
        console: prints to the cell.
    """

    def start(self) -> None:
        """Show the line."""
        self._shown_at = time.monotonic()
        self._handle: Any = import_module("IPython.display").display(
            self._content(), raw=True, display_id=True
        )

    def stop(self) -> None:
        """Show the last step of a training; remove the line if there was none."""
        is_empty = self._bar.tasks[0].total is None
        if not is_empty:
            self._bar.update(self._task, description="trained")
        self._handle.update({"text/plain": "", "text/html": ""} if is_empty else self._content(), raw=True)

    def act(self, text: str, facts: str = "") -> None:
        """Show what happens from now on."""
        super().act(text, facts)
        self._update()

    def train(self, step: StepRecord, of: int) -> None:
        """Show a training step, unless the last one has just been shown."""
        super().train(step, of)
        if time.monotonic() - self._shown_at > 1 / REFRESHES:
            self._update()

    def _update(self) -> None:
        self._shown_at = time.monotonic()
        self._handle.update(self._content(), raw=True)

    def _content(self) -> dict[str, str]:
        """Return the line as HTML, and as text for what shows no HTML."""
        task = self._bar.tasks[0]
        words, size = [task.description], ""
        if task.total is not None:
            done, total, left_s = round(task.completed), round(task.total), task.time_remaining
            size = f'value="{done}" max="{total}" '
            words += [f"{done}/{total}", task.fields["facts"]]
            words += [f"{left_s:,.0f} s left"] if left_s else []
        text = " · ".join(filter(None, words))
        style = 'style="width: 20em; vertical-align: middle"'
        return {"text/plain": text, "text/html": f"<progress {size}{style}></progress> {html.escape(text)}"}


class _OnlyWithTotal(bars.ProgressColumn):
    """A column that is empty for an act whose length is unknown."""

    def __init__(self, column: bars.ProgressColumn) -> None:
        super().__init__()
        self._column = column

    def render(self, task: bars.Task) -> RenderableType:
        """Return the cell of a task."""
        return Text("") if task.total is None else self._column(task)


class _Time(bars.ProgressColumn):
    """The time that remains, or the time since an act of unknown length began."""

    def __init__(self) -> None:
        super().__init__()
        self._elapsed, self._remaining = bars.TimeElapsedColumn(), bars.TimeRemainingColumn(compact=True)

    def render(self, task: bars.Task) -> RenderableType:
        """Return the cell of a task."""
        if task.total is None:
            return self._elapsed.render(task)
        return self._remaining.render(task) + Text(" left", style="dim")


def _bar_width(columns: int) -> int:
    return max(NARROWEST_BAR, min(WIDEST_BAR, columns // 5))
