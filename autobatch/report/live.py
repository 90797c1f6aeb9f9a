"""One live line on a terminal: a spinner with the current act, or the bar of the training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from autobatch.core.text import encodable, printable
from autobatch.core.units import format_bytes
from autobatch.report.words import metric_in_words, plural

if TYPE_CHECKING:
    from rich.console import RenderableType

    from autobatch.core.records import StepRecord

FIXED_COLUMNS = 30
"""Columns of the training line besides its figures and its bar."""
ACT_COLUMNS = 15
"""Columns of the line of an act besides its text: the spinner and the time."""
REFRESHES = 6
"""Refreshes per second; each takes a millisecond from what is measured."""
WIDEST_BAR, NARROWEST_BAR = 30, 8


class LiveLine:
    """The line at the bottom of a terminal; what is printed appears above it.

    Args:
        console: the terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._encoding = console.encoding
        is_utf = console.encoding.lower().startswith("utf")
        self._bar = Progress(
            SpinnerColumn("dots" if is_utf else "line", style="cyan"),
            TextColumn("{task.description}", markup=False),
            _OnlyWithTotal(BarColumn(bar_width=_bar_width(console.width))),
            _OnlyWithTotal(MofNCompleteColumn()),
            TextColumn("{task.fields[facts]}", markup=False, style="dim"),
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
            shown = sorted(step.validation.items(), key=lambda item: item[0] == "loss")
            self._held_out = "held-out " + metric_in_words(*shown[0])
        if self._bar.tasks[0].total is None:
            self._bar.reset(self._task, total=of, completed=step.step - 1)
        self._bar.update(
            self._task, completed=step.step, description="training", facts=self._shown(self._facts(step))
        )

    def _facts(self, step: StepRecord) -> str:
        """Return as many figures of a step as the line has room for, the most important first."""
        peak = step.peak_reserved_bytes or step.peak_allocated_bytes
        figures = [
            "" if step.loss is None else f"loss {step.loss:.4f}",
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


class _OnlyWithTotal(ProgressColumn):
    """A column that is empty for an act whose length is unknown."""

    def __init__(self, column: ProgressColumn) -> None:
        super().__init__()
        self._column = column

    def render(self, task: Task) -> RenderableType:
        """Return the cell of a task."""
        return Text("") if task.total is None else self._column(task)


class _Time(ProgressColumn):
    """The time that remains, or the time since an act of unknown length began."""

    def __init__(self) -> None:
        super().__init__()
        self._elapsed, self._remaining = TimeElapsedColumn(), TimeRemainingColumn(compact=True)

    def render(self, task: Task) -> RenderableType:
        """Return the cell of a task."""
        if task.total is None:
            return self._elapsed.render(task)
        return self._remaining.render(task) + Text(" left", style="dim")


def _bar_width(columns: int) -> int:
    return max(NARROWEST_BAR, min(WIDEST_BAR, columns // 5))
