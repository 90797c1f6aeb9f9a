"""The choices of the tuner, put into a plan."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from autobatch.core.knobs import PRECISION, SPLIT, SearchAxis, defaults
from autobatch.core.records.plan import Plan
from autobatch.core.records.tuning import LrTuning
from autobatch.planning import micro_batches
from autobatch.tuning.find_fastest import TuningResult


def with_choice(plan: Plan, found: TuningResult, axes: Sequence[SearchAxis]) -> Plan:
    """Put the tuner's choice into a plan. The effective batch stays."""
    base = defaults(axes)
    if found.winner is None or found.tuning.best == base:
        return plan
    sizes = micro_batches(sum(plan.micro_batches), found.winner.micro_batch)
    # Knobs at their default are left out, and the split is the plan itself.
    knobs = {
        name: value for name, value in found.tuning.best.items() if value != base[name] and name != SPLIT
    }
    return msgspec.structs.replace(
        plan,
        micro_batch=sizes[0],
        accumulation_steps=len(sizes),
        micro_batches=sizes,
        precision=knobs.pop(PRECISION, None) or plan.precision,
        knobs=knobs,
    )


def with_learning_rate(plan: Plan, found: LrTuning, *, declared: float) -> Plan:
    """Put the best learning rate into a plan; return the same plan if the default stays."""
    if found.best == plan.learning_rate:
        return plan
    return msgspec.structs.replace(
        plan,
        learning_rate=found.best,
        learning_rate_rule="tuned",
        learning_rate_factor=found.best / declared,
        learning_rate_source=f"tuned in {found.trials} runs of {found.steps} optimizer steps at this batch",
    )
