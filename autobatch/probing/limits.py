"""Predicting the largest micro-batch from what has run.

Best is the replay of allocation events that are exact polynomials in the micro-batch; only that may certify
that a size does not fit. Where some events are rounded by a library, a line through the farthest runs of each
event gives a guess to be confirmed by runs; where no events are known, or their structure changes with the
size, the line through the two largest peaks does (that one is off by up to 27 %: memory is a maximum over
phases).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from autobatch.core.errors import AutobatchError
from autobatch.core.knobs import COMPILE
from autobatch.core.records import Attempt, MemoryCurve, PredictedPoint, Remedy
from autobatch.device.allocator.ledger import Allocator
from autobatch.device.allocator.trace import Trace, replay
from autobatch.device.profiles import data_home, match_profile
from autobatch.footprint.explain import memory_curve, predicted_points
from autobatch.footprint.predict import Footprint, footprint, with_workspaces
from autobatch.footprint.program import Program, Untraceable, largest
from autobatch.footprint.remedies import Spending, find_remedies
from autobatch.footprint.trace_step import Setting
from autobatch.probing.attempt import ATTEMPT_STEPS, OTHER_ATTEMPT_STEPS, Outcome, TrainSetup
from autobatch.probing.setup import SetupInfo, describe_setup, new_allocator
from autobatch.workload.rng import preserved_random_state

FIRST_SIZE = 2
"""The first size to run: 1 is a special case to many operators (broadcasting, batch statistics)."""
DISTANCES = (29, 23, 19, 17, 13, 11, 7, 5, 3, 2, 1)
"""From the first size to the second: far enough for exact slopes, small enough to be quick, and prime, so
that sizes which a library rounds hardly ever look as if they grew by whole bytes a sample."""
ENOUGH_POINTS = 3
"""Sizes that settle whether the events are lines, parabolas or neither."""


class ReplayPredictor:
    """Replays the events of attempts at other sizes; see `autobatch.probing.search.Predictor`.

    Args:
        new_allocator: an empty allocator with the device's budget.
        program: a program predicted without running anything, if there is one.
        other_order: predicts the second look of an attempt; asked once it refused what the first let pass.
    """

    def __init__(
        self,
        new_allocator: Callable[[], Allocator],
        program: Program | None = None,
        other_order: Callable[[], Program | None] = lambda: None,
    ) -> None:
        self._new_allocator = new_allocator
        self._program = program
        self._predict_other = other_order
        self._other: Program | None = None
        self._exact = True
        self._confirmed = False
        self._points: list[tuple[int, Trace]] = []
        self._peaks: dict[int, int] = {}

    def learn(self, outcome: Outcome) -> None:
        """Take in an attempt: check the program against it, and fit it anew where it was wrong."""
        size, peak = outcome.attempt.micro_batch, peak_bytes(outcome.attempt)
        if not outcome.attempt.fits:
            if outcome.trace is not None and self._agrees(size, outcome.trace):
                # It ran, and was refused in another order of the windows.
                self._other = self._other or self._predict_other()
            return
        if self._other and outcome.other and not self._other.agrees_with(size, outcome.other):
            self._other = None
        if peak is not None:
            self._peaks[size] = peak
        if outcome.trace is None:
            return
        self._points.append((size, outcome.trace))
        if self._agrees(size, outcome.trace):
            self._confirmed = True
            return
        self._confirmed = False
        self._program = self._fit()

    def next_calibration_size(self, cap: int) -> int | None:
        """A size that is safe to run and teaches most; ``None``: enough has run."""
        known = sorted(self._peaks)
        if not known:
            return min(FIRST_SIZE, cap)
        budget = self._new_allocator().limit
        if len(known) == 1 and budget is not None:
            if known[0] > FIRST_SIZE + DISTANCES[0]:
                # A prediction led here and was not quite right: what is smaller fits.
                return known[0] - DISTANCES[0]
            room = self._in_proportion(known[0], cap) - known[0]
            return known[0] + next((distance for distance in DISTANCES if distance <= room), 1)
        undecided = self._program is None or (self._exact and not self._confirmed)
        if undecided and 0 < len(self._points) < ENOUGH_POINTS:
            between = (known[-2] + known[-1]) // 2
            if between > known[-2]:
                return between
            room = self._in_proportion(known[-1], cap) - known[-1]
            return known[-1] + max(1, min(2, room))
        return None

    def largest(self, cap: int) -> int | None:
        """The largest micro-batch predicted to fit, at most ``cap`` and possibly 0; ``None``: cannot say."""
        if self._program is not None:
            try:
                return largest(self._program, self._new_allocator, cap, other=self._other) or 0
            except Untraceable:
                self._program = None
        if 0 < len(self._points) < ENOUGH_POINTS:
            return None
        return self._from_peaks(cap)

    def proves_next_fails(self, micro_batch: int) -> bool:
        """Whether a program that a further run agreed with shows that ``micro_batch + 1`` does not fit."""
        if self._program is None or not self._confirmed:
            return False
        orders = [self._program] if self._other is None else [self._program, self._other]
        try:
            return not all(replay(order.at(micro_batch + 1), self._new_allocator()).fits for order in orders)
        except Untraceable:
            return False

    def _agrees(self, size: int, trace: Trace) -> bool:
        return self._exact and self._program is not None and self._program.agrees_with(size, trace)

    def _in_proportion(self, known: int, cap: int) -> int:
        """A size that fits: memory has a fixed part, so it grows slower than in proportion."""
        budget = self._new_allocator().limit
        return cap if budget is None else min(cap, known * budget // max(self._peaks[known], 1))

    def _fit(self) -> Program | None:
        """A line through two sizes, a parabola through three where no line holds, else the nearest line."""
        points = sorted(self._points, key=lambda point: point[0])
        self._exact = True
        for count in (2, ENOUGH_POINTS):
            latest = points[-count:]
            if len(latest) < count:
                return None
            try:
                program = Program.fit(latest)
            except Untraceable:
                continue
            if count == len(points) and program.bends():
                return None
            # Of smaller sizes only those that take other steps may differ; where a library rounds, sizes of
            # one kind (all odd, say) lie on a line that the others do not.
            alike = [point for point in points if len(point[1].canonical().events) == len(program.events)]
            if all(program.agrees_with(*point) for point in [*alike, *points[-ENOUGH_POINTS:]]):
                return program
        self._exact = False
        try:
            return Program.near(points)
        except Untraceable:
            return None

    def _from_peaks(self, cap: int) -> int | None:
        """Where the line through the two largest peaks meets the budget."""
        budget = self._new_allocator().limit
        if len(self._peaks) < 2 or budget is None:
            return None
        (small, low), (large, high) = sorted(self._peaks.items())[-2:]
        if high <= low:
            return None
        return min(cap, large + (budget - high) * (large - small) // (high - low))


def peak_bytes(attempt: Attempt) -> int | None:
    """What is held against the budget: peak reserved, or peak allocated where nothing is cached."""
    if attempt.peak_reserved_bytes is not None:
        return attempt.peak_reserved_bytes
    return attempt.peak_allocated_bytes


def trace_footprint(setup: TrainSetup, steps: Sequence[int] = ATTEMPT_STEPS) -> Footprint | None:
    """Trace an attempt on tensors without memory; ``None`` where that would not tell what will be recorded.

    On a card the first runs tell more: its libraries take workspaces that no trace sees.

    Args:
        setup: what attempts run on.
        steps: micro-batches of each step.
    """
    if not setup.device.is_traceable:
        return None
    try:
        # Data that is augmented draws while it is read.
        with preserved_random_state():
            return footprint(replace(_setting(setup), steps=steps))
    except AutobatchError:
        # Whatever cannot be traced is run.
        return None


def other_order(setup: TrainSetup) -> Program | None:
    """What the second look of an attempt allocates; ``None`` where it cannot be traced."""
    step = trace_footprint(setup, OTHER_ATTEMPT_STEPS)
    return None if step is None else step.program


def traced_peak(setup: TrainSetup, micro_batch: int) -> int | None:
    """Peak reserved of a micro-batch on a card, in bytes, as a trace alone predicts it.

    For comparison with what a run measured there; ``None`` on other devices, and where it cannot be traced.
    """
    capability = setup.device.compute_capability
    if capability is None:
        return None
    device = setup.device.describe()
    gpu = match_profile(device.name, device.total_bytes, capability, user_dir=data_home(os.environ))
    try:
        with preserved_random_state():
            program = with_workspaces(footprint(_setting(setup)), None if gpu is None else gpu.workspaces)
        unlimited = new_allocator(describe_setup(setup), capped=False)
        return replay(program.at(micro_batch), unlimited).peak_reserved_bytes
    except AutobatchError:
        return None


def remedies_of(setup: TrainSetup, step: Footprint | None) -> list[Remedy]:
    """What would let a micro-batch fit that does not; nothing where the step cannot be traced.

    Args:
        setup: what was probed.
        step: its footprint, if that was traced already.
    """
    facts = describe_setup(setup)

    def allocator(expandable: bool) -> Allocator | None:
        if expandable and facts.allocator is None:
            return None
        return new_allocator(facts, expandable=expandable)

    spending = Spending(
        allocator=allocator,
        unlimited=lambda expandable: new_allocator(facts, capped=False, expandable=expandable),
        cap=facts.samples,
        expandable=facts.allocator is not None and facts.allocator.expandable_segments,
    )
    setting = _setting(setup)
    try:
        with preserved_random_state():
            return find_remedies(setting, step or footprint(setting), spending)
    except AutobatchError:
        return []


def predicted_memory(
    step: Footprint | None, facts: SetupInfo, micro_batch: int
) -> tuple[list[PredictedPoint], MemoryCurve | None]:
    """Predicted peaks around an answer, and where the memory goes over a step at it; where it was traced."""
    if step is None:
        return [], None

    def unlimited() -> Allocator:
        return new_allocator(facts, capped=False)

    try:
        curve = memory_curve(step, micro_batch, unlimited())
    except Untraceable:
        return [], None
    return predicted_points(step, micro_batch, unlimited, facts.samples), curve


def _setting(setup: TrainSetup) -> Setting:
    """What an attempt on the bench does; with the operators of the card, where it is one."""
    return Setting(
        workload=setup.workload,
        model=setup.model,
        batch_of=setup.worst_case.batch,
        precision=setup.precision,
        capability=setup.device.compute_capability,
        steps=ATTEMPT_STEPS,
        samples=setup.whole_batch,
        max_grad_norm=setup.max_grad_norm,
        ema=setup.ema,
        # A compiled model is predicted as its module runs without the compiler.
        knobs={name: value for name, value in setup.knobs.items() if name != COMPILE},
    )
