"""One probe: its surroundings, its attempts and its answer.

A failure is an answer, too: an error above a size that fits bounds the search, a size that spills to the
host's memory does not fit, and a refusal that the budget did not cause is repeated.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from autobatch.core.errors import AutobatchError, UserCodeError
from autobatch.core.options import Options
from autobatch.core.progress import Progress
from autobatch.core.records import Attempt, LimitedBy, Probe
from autobatch.core.text import error_text
from autobatch.device.allocator.trace import FREE, Trace
from autobatch.device.oom import loses_context
from autobatch.footprint.fit import Footprint
from autobatch.search import questions
from autobatch.search.cache import Untraced
from autobatch.search.replay import Replay, replay_on
from autobatch.setup.attempt import ATTEMPT_STEPS, Outcome
from autobatch.setup.child import ChildCrashed
from autobatch.setup.session import SetupProcess
from autobatch.setup.setup import SetupInfo

AMPLE_ROOM = 0.8
"""Share of the budget below which a predicted peak leaves so much room that a cached limit is in doubt."""


def has_ample_room(attempt: Attempt, budget_bytes: int) -> bool:
    """Return whether the peak of a size that fits leaves room for far more than one sample more.

    Memory has a fixed part, so one sample more takes at most ``peak ÷ micro_batch``. At a true limit the sum
    therefore exceeds the budget, but for workspaces and fragments.
    """
    peak = peak_bytes(attempt)
    return peak is not None and peak + peak / attempt.micro_batch < AMPLE_ROOM * budget_bytes


def peak_bytes(attempt: Attempt) -> int | None:
    """Return the peak that the budget limits: reserved, or allocated if the device caches nothing."""
    if attempt.peak_reserved_bytes is not None:
        return attempt.peak_reserved_bytes
    return attempt.peak_allocated_bytes


SPILL_FACTOR = 3.0
"""A size that takes this much longer per sample than the fastest does not run in the GPU's own memory."""


class SpillGuard:
    """Reject sizes that run several times slower per sample: some drivers spill to the host's memory.

    Only sizes larger than those that ran well are rejected. Smaller ones are slower per sample for what comes
    once a step, such as a loss over the whole batch.

    Args:
        active: whether this device's driver may spill.
    """

    def __init__(self, *, active: bool) -> None:
        self._active = active
        self._best: float | None = None
        self._largest = 0

    def judge(self, outcome: Outcome) -> Outcome:
        """Return the outcome, changed to one that does not fit if the size spilled."""
        attempted = outcome.attempt
        if not (self._active and attempted.fits and attempted.step_seconds):
            return outcome
        per_sample = attempted.step_seconds / attempted.micro_batch
        is_larger = attempted.micro_batch > self._largest
        if self._best is None or not is_larger or per_sample <= SPILL_FACTOR * self._best:
            self._best = per_sample if self._best is None else min(self._best, per_sample)
            self._largest = max(self._largest, attempted.micro_batch)
            return outcome
        reason = (
            f"it runs at {per_sample / self._best:.1f} times the best time per sample: the driver seems to "
            "spill to the host's memory instead of failing"
        )
        return Outcome(msgspec.structs.replace(attempted, fits=False, reason=reason), None)


LOST = "lost GPU context"
"""The reason for which a search stops if the process that lost its context cannot be replaced."""


class FailedSizes:
    """A run of sizes in which an error above a size that fits is an outcome.

    Args:
        run: makes an attempt, and raises what the workload raises.
        process: holds the setup; a new child takes the place of one that crashed or lost its GPU context.
    """

    def __init__(self, run: Callable[[int], Outcome], process: SetupProcess) -> None:
        self._run = run
        self._process = process
        self._largest = 0
        """The largest size that has fitted."""
        self.stopped_by: str | None = None
        """`LOST` once no further size can run; None otherwise."""

    def __call__(self, size: int) -> Outcome:
        """Make an attempt; one that the budget did not refuse is repeated once.

        Raises:
            InputError: the workload is invalid.
            Exception: whatever the workload raises at fewer samples than fit.
        """
        outcome = self._attempt(size)
        if outcome.attempt.is_below_budget:
            outcome = self._attempt(size)
        if outcome.attempt.fits:
            self._largest = max(self._largest, size)
        return outcome

    def _attempt(self, size: int) -> Outcome:
        failure: Exception
        try:
            return self._run(size)
        except Exception as error:
            may_depend_on_size = not isinstance(error, AutobatchError) or isinstance(
                error, UserCodeError | ChildCrashed
            )
            if size <= self._largest or not may_depend_on_size:
                raise
            failure = error
        # Outside of the except block, so that nothing holds the tensors of the failed attempt.
        traceback.clear_frames(failure.__traceback__)
        if isinstance(failure, ChildCrashed) or loses_context(failure):
            if self._process.is_replaceable:
                self._process.restart()
            else:
                self.stopped_by = LOST
        attempt = Attempt(
            micro_batch=size,
            fits=False,
            peak_allocated_bytes=None,
            peak_reserved_bytes=None,
            seconds=0.0,
            reason=error_text(failure, first_line=True),
            is_error=True,
        )
        return Outcome(attempt, None, error=failure)


def variation_of(trace: Trace) -> float | None:
    """Return the share by which equal micro-batches of an attempt differ in what they allocate.

    All micro-batches of an attempt have the same samples. Those of its later steps do the same work, so they
    differ only if the data or the model draw at random, or depend on weights that have changed.

    Returns:
        None if they do not differ, or if the events have no phases.
    """
    allocated = _allocated(trace)
    if len(allocated) != sum(ATTEMPT_STEPS):
        return None
    _, first, second = ATTEMPT_STEPS
    pairs = zip(allocated[-first - second : -second], allocated[-second:], strict=True)
    return max(max(pair) / max(min(pair), 1) - 1 for pair in pairs) or None


def _allocated(trace: Trace) -> list[int]:
    """Return the bytes that each micro-batch allocates, in its forward and backward pass."""
    starts = [position for position, phase in trace.marks if phase == "forward"]
    ends = [position for position, phase in trace.marks if phase in ("forward", "optimizer")]
    return [
        sum(size for _, size in trace.events[start : min(end for end in ends if end > start)] if size != FREE)
        for start in starts
    ]


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

    def info_at(self, budget_bytes: int) -> SetupInfo:
        """Return the setup with another budget."""
        info = self.process.info
        device = msgspec.structs.replace(info.device, budget_bytes=budget_bytes)
        return msgspec.structs.replace(info, device=device)

    def replay(self, step: Footprint | None, budget_bytes: int) -> Replay:
        """Return what predicts sizes in a budget from a traced step, or from runs alone."""
        return replay_on(self.info_at(budget_bytes), step, lambda: questions.trace_other_order(self.process))

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
