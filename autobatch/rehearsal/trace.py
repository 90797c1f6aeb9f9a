"""Traces of the setup that is probed: its footprint, its peaks, and what would let more fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from autobatch.core.errors import AutobatchError
from autobatch.core.knobs import COMPILE
from autobatch.core.records import MemoryCurve, PredictedPoint
from autobatch.footprint.depth import deep_footprint
from autobatch.footprint.explain import memory_curve, predicted_points
from autobatch.footprint.fit import Footprint
from autobatch.footprint.predict import program_on
from autobatch.footprint.program import Program, TooLong, Untraceable
from autobatch.footprint.tracing.trace_step import Setting
from autobatch.rehearsal.attempt import ATTEMPT_STEPS, OTHER_ATTEMPT_STEPS
from autobatch.rehearsal.setup import Setup, SetupInfo, new_allocator
from autobatch.workload.rng import preserved_random_state

MOST_TRACED = 1000
"""Parameter tensors above which no step is traced: a trace takes 10 ms for each, and a run less than 1 ms. Of
like layers only those count that are traced."""


MOST_OPERATORS = 30_000
"""Operators above which no step is traced, about 5 seconds; an unrolled recurrent layer has that many."""


def trace_footprint(
    setup: Setup, steps: Sequence[int] = ATTEMPT_STEPS, *, says_why: bool = False
) -> Footprint | None:
    """Trace an attempt on tensors without memory. Return None if it cannot be traced.

    Args:
        setup: the model and the data.
        steps: micro-batches of each step.
        says_why: raise an error if the trace takes too long.

    Raises:
        TooLong: the step has too many operators, if ``says_why``.
    """
    try:
        # Augmented data draw random numbers while they are read.
        with preserved_random_state():
            return _trace(replace(setting_of(setup), steps=steps))
    except TooLong:
        if says_why:
            raise
    except AutobatchError:
        pass
    return None


def other_order(setup: Setup) -> Program | None:
    """Trace an attempt in the other order. Return None if it cannot be traced."""
    step = trace_footprint(setup, OTHER_ATTEMPT_STEPS)
    return None if step is None else program_on(step, setup.device.libraries)


def predicted_memory(
    step: Footprint | None, info: SetupInfo, micro_batch: int
) -> tuple[list[PredictedPoint], MemoryCurve | None]:
    """Predict the peaks around a micro-batch, and the memory over a step at it, by category.

    Returns:
        No points and None if the step was not traced.
    """
    if step is None:
        return [], None
    unlimited = partial(new_allocator, info, capped=False)
    try:
        curve = memory_curve(step, micro_batch, unlimited())
    except Untraceable:
        return [], None
    return predicted_points(step, micro_batch, unlimited, info.samples), curve


def _trace(setting: Setting) -> Footprint:
    return deep_footprint(setting, most_tensors=MOST_TRACED).step


def setting_of(setup: Setup) -> Setting:
    """Return what a trace of an attempt runs, with the operators of the GPU if the device is one."""
    return Setting(
        workload=setup.workload,
        model=setup.model,
        batch_of=setup.worst_case.batch,
        precision=setup.precision,
        gradient_dtype=setup.gradient_dtype,
        capability=setup.device.compute_capability,
        steps=ATTEMPT_STEPS,
        samples=setup.whole_batch,
        max_grad_norm=setup.max_grad_norm,
        ema=setup.ema,
        world=1 if setup.sharding else setup.world,
        arrange=setup.sharding,
        keeps_batches=setup.keeps_batches,
        most_operators=MOST_OPERATORS,
        # A compiled model is traced as its module.
        knobs={name: value for name, value in setup.knobs.items() if name != COMPILE},
    )
