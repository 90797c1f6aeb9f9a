"""Choice of the predictor of a probe, and the question whether a cached limit is too small."""

from __future__ import annotations

import msgspec

from autobatch.device.allocator.ledger import Allocator
from autobatch.footprint.predict import Footprint
from autobatch.search import questions
from autobatch.search.cache import CachedLimit
from autobatch.search.known_sizes import KnownSizes
from autobatch.search.limits import ReplayPredictor, first_size
from autobatch.search.peaks import has_ample_room
from autobatch.search.search import Predictor
from autobatch.setup.attempt import Outcome
from autobatch.setup.child import SetupProcess
from autobatch.setup.setup import new_allocator


def predictor_of(process: SetupProcess, step: Footprint | None, cap: int | None) -> Predictor:
    """Return what predicts the limit.

    Args:
        process: holds the setup.
        step: the traced step; None if it follows no rule in the micro-batch, or cannot be traced.
        cap: the largest micro-batch to trace alone without a step; None to trace none.
    """

    def allocator() -> Allocator:
        return new_allocator(process.info)

    predictor = ReplayPredictor(
        allocator,
        None if step is None else step.program,
        lambda: questions.trace_other_order(process),
        first_size=first_size(process.info.compute_capability),
    )
    traces = questions.trace_single(process, cap) if step is None and cap is not None else {}
    return KnownSizes(traces, allocator, predictor) if traces else predictor


def is_too_small(
    process: SetupProcess, cached: CachedLimit, outcome: Outcome, step: Footprint | None
) -> bool:
    """Return whether more than a cached limit fits, according to the replay or else to the peak of its run.

    The budget is the smaller of now and then, because close budgets count as the same.
    """
    then, device = cached.key.get("budget_bytes"), process.info.device
    budget = min(then, device.budget_bytes) if isinstance(then, int) else device.budget_bytes
    info = msgspec.structs.replace(process.info, device=msgspec.structs.replace(device, budget_bytes=budget))
    predictor = ReplayPredictor(
        lambda: new_allocator(info),
        None if step is None else step.program,
        lambda: questions.trace_other_order(process),
    )
    next_fits = predictor.says_next_fits(outcome)
    return has_ample_room(outcome.attempt, budget) if next_fits is None else next_fits
