"""One probe: its bounds, its surroundings and its answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from autobatch.core.options import Options
from autobatch.core.progress import Progress
from autobatch.core.records.probe import LimitedBy, Probe
from autobatch.device.allocator.ledger import Allocator
from autobatch.footprint.predict import Footprint
from autobatch.search import questions
from autobatch.search.kept_trace import Untraced
from autobatch.search.replay import Replay
from autobatch.search.spill import SpillGuard
from autobatch.setup.attempt import Outcome
from autobatch.setup.child import SetupProcess
from autobatch.setup.setup import SetupInfo, new_allocator
from autobatch.setup.trace import program_on


class Limit(NamedTuple):
    """The answer of a probe, with its file and footprint for later stages."""

    probe: Probe
    file: Path | None = None
    """File that keeps the answer; None if it was not saved."""
    footprint: Footprint | None = None
    """The traced step; None if nothing was traced."""
    untraced: Untraced | None = None
    """The reason if the step is too long to be traced."""


class Probing(NamedTuple):
    """Surroundings of one probe, which all of its parts use."""

    process: SetupProcess
    options: Options
    caps: dict[LimitedBy, int]
    guard: SpillGuard
    progress: Progress

    @property
    def cap(self) -> int:
        """The largest micro-batch to try."""
        return min(self.caps.values())

    def limited_by(self, micro_batch: int) -> LimitedBy:
        """Return what limits an answer: the first cap that it reaches, else memory."""
        return next((name for name, cap in self.caps.items() if cap == micro_batch == self.cap), "memory")

    def allocator(self, budget_bytes: int | None = None) -> Callable[[], Allocator]:
        """Return what makes an empty allocator with the device's budget, or another one."""
        info = self.process.info
        if budget_bytes is not None:
            device = msgspec.structs.replace(info.device, budget_bytes=budget_bytes)
            info = msgspec.structs.replace(info, device=device)
        return lambda: new_allocator(info)

    def replay(self, step: Footprint | None, *, budget_bytes: int | None = None) -> Replay:
        """Return what predicts sizes from a traced step, or from runs alone."""
        return Replay(
            self.allocator(budget_bytes),
            None if step is None else program_on(step, self.process.info),
            lambda: questions.trace_other_order(self.process),
        )

    def run(self, size: int) -> Outcome:
        """Make one attempt and report it."""
        return self.report(self.attempt(size))

    def attempt(self, size: int) -> Outcome:
        """Make one attempt."""
        self.progress.doing(f"running {size:,} samples at once")
        return self.guard.judge(questions.run_attempt(self.process, size))

    def report(self, outcome: Outcome) -> Outcome:
        """Report an attempt, and return it."""
        self.progress.attempted(outcome.attempt)
        return outcome


def caps_of(info: SetupInfo, options: Options, share: int | None = None) -> dict[LimitedBy, int]:
    """Return the caps of the micro-batch besides memory, in samples, by their name.

    Args:
        info: the setup.
        options: options of the run.
        share: samples of a batch that one rank takes; None for all of the batch, if there is one.
    """
    caps: dict[LimitedBy, int] = {}
    batch = options.batch.target_batch if share is None else share
    if batch is not None:
        caps["target_batch"] = batch
    if options.search.max_micro_batch is not None:
        caps["max_micro_batch"] = options.search.max_micro_batch
    caps["dataset"] = info.samples
    return caps
