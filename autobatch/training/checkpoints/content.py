"""Checks of what a checkpoint holds: its facts and its state are input, also with valid sums."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from autobatch.core.errors import CheckpointError
from autobatch.core.knobs import LOADER_WORKERS, PREFETCH
from autobatch.core.records import Plan
from autobatch.training.checkpoints.manifest import MANIFEST
from autobatch.training.checkpoints.state_file import STATE
from autobatch.workload.data_digest import DataDigest
from autobatch.workload.order import LastBatch
from autobatch.workload.rng import random_state_of

_Count = Annotated[int, Meta(ge=0)]
_Positive = Annotated[int, Meta(ge=1)]
_PositiveFloat = Annotated[float, Meta(gt=0, le=sys.float_info.max)]


class _Facts(msgspec.Struct):
    """See `autobatch.training.run.train_plan`."""

    plan: Plan
    seed: int
    warmup_samples: _Positive | None
    total_steps: _Positive
    samples: _Positive
    last_batch: LastBatch
    total_samples: _Positive
    ranks: list[dict[str, Any]]
    key: dict[str, Any] = {}
    sample_seeds: bool = False
    notes: list[str] = []
    failed_checkpoints: list[int] = []
    times: dict[str, dict[str, float]] = {}
    data: DataDigest | None = None
    records: dict[str, Any] = {}


class _Counters(msgspec.Struct):
    """See `autobatch.training.loop_state`."""

    batches_seen: _Count
    steps_applied: _Count
    oom_recoveries: _Count
    skipped_steps_in_a_row: _Count


class _State(msgspec.Struct):
    """The part of a state whose form does not depend on the workload; see `loop_state.capture_loop`."""

    counters: _Counters
    model: dict[str, Any]
    buffers: dict[str, Any]
    optimizers: list[dict[Any, Any]]
    schedules: list[dict[Any, Any]]
    scaler: dict[str, Any] | None
    average: dict[str, Any] | None
    items_per_sample: _PositiveFloat | None
    noise: dict[str, Any]
    random: list[dict[str, Any]]
    limits: list[_Positive]


def check_content(path: Path, state: Any, facts: Mapping[str, Any]) -> None:
    """Check that a checkpoint holds a state that a run can continue from.

    Args:
        path: its folder, whose name has the number of its batches.
        state: what `autobatch.training.loop_state.capture_loop` returned.
        facts: what `autobatch.training.run.train_plan` stored beside it.

    Raises:
        CheckpointError: an entry is missing, has another type, or is out of its range; names it.
    """
    name = MANIFEST
    try:
        _check_plan(msgspec.convert(facts, _Facts).plan)
        name = STATE
        found = msgspec.convert(state, _State)
        _check_counters(found.counters, int(path.name.removeprefix("step-")))
        for one in found.random:
            random_state_of(one)
    except (ValueError, TypeError, LookupError) as error:  # with msgspec.ValidationError
        raise CheckpointError(f"{path}: {name} holds no run to resume: {error}") from None


def _check_plan(plan: Plan) -> None:
    if not 1 <= plan.micro_batch <= plan.target_batch:
        raise ValueError(
            f"the micro-batch of the plan must be between 1 and the target batch of {plan.target_batch}, "
            f"found {plan.micro_batch}"
        )
    if not 0 < plan.learning_rate < math.inf:
        raise ValueError(f"the learning rate of the plan must be above 0, found {plan.learning_rate}")
    for knob in (LOADER_WORKERS, PREFETCH):
        value = plan.knobs.get(knob)
        if value is not None and (not isinstance(value, int) or value < 0):
            raise ValueError(f"{knob} must be a number from 0 on, found {value!r}")


def _check_counters(counters: _Counters, step: int) -> None:
    if counters.batches_seen != step:
        raise ValueError(f"batches_seen must be {step}, found {counters.batches_seen}")
    if counters.steps_applied + counters.skipped_steps_in_a_row > counters.batches_seen:
        raise ValueError(
            f"{counters.steps_applied} applied and {counters.skipped_steps_in_a_row} skipped steps are more "
            f"than the {counters.batches_seen} batches"
        )
