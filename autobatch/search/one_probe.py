"""One probe: its bounds, its surroundings and its answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from autobatch.core.progress import Progress
from autobatch.core.records.probe import LimitedBy, Probe
from autobatch.device.allocator.ledger import Allocator
from autobatch.footprint.predict import Footprint
from autobatch.planning import rank_share
from autobatch.search import questions
from autobatch.search.kept_trace import Untraced
from autobatch.search.replay import Replay
from autobatch.search.spill import SpillGuard
from autobatch.setup.attempt import Outcome
from autobatch.setup.child import SetupProcess
from autobatch.setup.setup import SetupInfo, new_allocator
from autobatch.setup.trace import program_on


@dataclass(frozen=True, kw_only=True)
class ProbeLimits:
    """Bounds of a probe: plain values."""

    target_batch: int | None = None
    """None if the probe is not for a plan."""
    max_micro_batch: int | None = None
    time_limit_s: float = math.inf
    multiple: int | None = None
    """Number whose multiples micro-batches are; None to find out whether there is one."""
    world: int = 1
    """Ranks that share a batch."""
    has_own_budget: bool = False
    """True if the budget was given, and does not follow free memory."""


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
    limits: ProbeLimits
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


def caps_of(info: SetupInfo, limits: ProbeLimits) -> dict[LimitedBy, int]:
    """Return the caps of the micro-batch besides memory, in samples, by their name."""
    caps: dict[LimitedBy, int] = {}
    if limits.target_batch is not None:
        caps["target_batch"] = rank_share(limits.target_batch, 1, 0)
    if limits.max_micro_batch is not None:
        caps["max_micro_batch"] = limits.max_micro_batch
    caps["dataset"] = info.samples
    return caps
