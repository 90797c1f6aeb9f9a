"""The largest micro-batch of samples of each size, by replay of a step that was traced at a few shapes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from autobatch.core.errors import AutobatchError
from autobatch.core.knobs import PRECISION, memory_signature
from autobatch.core.largest import largest, near
from autobatch.core.records import Plan
from autobatch.device.allocator.ledger import Allocator
from autobatch.footprint.program import Untraceable
from autobatch.footprint.sizes import TRACED_STEPS, Shape, SizeProgram, fit_size_program, replay_batches
from autobatch.footprint.tracing.apart import run_each_apart
from autobatch.footprint.tracing.trace_mode import Recording
from autobatch.footprint.tracing.trace_step import Setting, record
from autobatch.rehearsal.process import Session
from autobatch.rehearsal.setup import Setup, with_knobs
from autobatch.rehearsal.trace import setting_of
from autobatch.workload.contract import Collated
from autobatch.workload.data import load_micro_batch
from autobatch.workload.rng import preserved_random_state

Sizes = NDArray[np.float64]
SECONDS = 30.0
"""Longest expected time of tracing, on the processor; a model that takes longer runs real batches instead."""
KNOTS = 12
"""Sizes at which a curve is computed."""
STEADY_STEPS = 3
"""Steps of a replay of equal micro-batches."""
LEAST_SIZES = 4
"""Different sizes that determine a parabola and check it."""


def trace_sizes(setting: Setting, sizes: Sizes) -> SizeProgram:
    """Trace a step at shapes that determine its program over micro-batch and size.

    Raises:
        Untraceable: the step follows no such program, has too few sizes, or takes too long to trace.
        AutobatchError: the step cannot be traced.
    """
    samples = _spread(sizes)
    plan = [(m, index) for index in samples[:3] for m in (2, 3)] + [(5, samples[3])]
    # The first trace also imports what the others use, so the second one is timed, in seconds of processors.
    found = _record(setting, plan[:1])
    start = sum(os.times()[:4])
    found += _record(setting, plan[1:2])
    expected = (sum(os.times()[:4]) - start) * len(plan)
    if expected > SECONDS:
        raise Untraceable(f"tracing the sizes of the samples would take {expected:.0f} s")
    found += _record(setting, plan[2:])
    shapes = [Shape(m, float(sizes[index])) for m, index in plan]
    return fit_size_program(list(zip(shapes, found, strict=True)))


def _spread(sizes: Sizes) -> list[int]:
    """Return samples of a small, a middle and the largest size, and one of another size to check them.

    Raises:
        Untraceable: there are not enough sizes.
    """
    order = np.argsort(sizes, kind="stable")
    different = order[np.unique(sizes[order], return_index=True)[1]]
    # A size of 0 or 1 is a special case for many operators.
    different = different[sizes[different] > 1] if (sizes[different] > 1).sum() >= LEAST_SIZES else different
    if len(different) < LEAST_SIZES:
        raise Untraceable(f"the samples have only {len(different)} different sizes")
    last = len(different) - 1
    chosen = [0, last // 2, last]
    check = next(at for at in range(max(1, last // 4), last) if at not in chosen)
    return [int(different[at]) for at in [*chosen, check]]


def _record(setting: Setting, plan: Sequence[tuple[int, int]]) -> list[Recording]:
    """Trace micro-batches that repeat one sample, given their numbers of samples and its index."""
    with _untraceable(), preserved_random_state():
        batches = [load_micro_batch(setting.workload, [index] * m) for m, index in plan]
    functions = [partial(_recorded, setting, m, batch) for (m, _), batch in zip(plan, batches, strict=True)]
    return run_each_apart(functions)


def _recorded(setting: Setting, micro_batch: int, batch: Collated) -> Recording:
    with _untraceable():
        found = record(replace(setting, batch_of=lambda _: batch, steps=TRACED_STEPS), micro_batch)
    if found.has_reads:
        # No run checks these limits, and the values were made up.
        raise Untraceable("NumPy reads values of the step")
    return found


@contextmanager
def _untraceable() -> Iterator[None]:
    """Turn an error of the workload into `Untraceable`."""
    try:
        yield
    except AutobatchError:
        raise
    except Exception as error:
        raise Untraceable(f"the step does not run without values ({type(error).__name__})") from error


def curve_of(
    program: SizeProgram,
    sizes: Sizes,
    new_allocator: Callable[[], Allocator],
    *,
    limit: int | None,
    cap: int,
) -> list[tuple[float, int]]:
    """Return the largest micro-batch for samples up to several sizes, in ascending order of size.

    The ``limit`` is that of the largest samples, which ran; None to replay that one too.
    """
    knots = np.unique(np.quantile(sizes, np.linspace(0, 1, KNOTS + 1)[1:], method="higher"))
    found: list[tuple[float, int]] = []
    least, larger = limit or 1, float(knots[-1])
    for size in knots[::-1].tolist():

        def fits(m: int, size: float = size) -> bool:
            shape = Shape(m, size)
            steps = [[shape, shape]] * STEADY_STEPS
            return replay_batches(program, steps, new_allocator(), most_events=10**9) is not None

        if found or limit is None:
            # Samples that are smaller fit at least as well as larger ones.
            likely = near(int(least * larger / size) if size > 0 else cap)
            least = largest(fits, least, max(cap, least) + 1, likely)
        larger = size
        found.append((size, min(least, cap)))
    return found[::-1]


@dataclass(frozen=True)
class _TracedSizes:
    """The program of a setup over sizes, which its session holds; None if it cannot be traced."""

    program: SizeProgram | None


def program_of(session: Session, plan: Plan | None = None) -> SizeProgram | None:
    """Trace a setup over the sizes of its samples, in the configuration of a plan if one is given.

    Returns:
        None if the step follows no such program, and on a GPU, whose libraries take more than is traced.
    """
    setup = session.setup
    if plan is not None and not is_of_probe(setup, plan):
        return trace_setup(configured(setup, plan))
    traced = session.find(_TracedSizes) or session.keep(_TracedSizes(trace_setup(setup)))
    return traced.program


def is_of_probe(setup: Setup, plan: Plan) -> bool:
    """Return whether the steps of a plan take the memory of those that were probed."""
    return not memory_signature(plan.knobs) and plan.precision == setup.precision


def configured(setup: Setup, plan: Plan) -> Setup:
    """Return a setup with the configuration of a plan."""
    return with_knobs(setup, {**plan.knobs, PRECISION: plan.precision})


def trace_setup(setup: Setup) -> SizeProgram | None:
    """Trace a setup over the sizes of its samples; None as in `program_of`."""
    sizes = setup.worst_case.sizes()
    if sizes is None or setup.device.compute_capability is not None:
        return None
    try:
        with preserved_random_state():
            return trace_sizes(setting_of(setup), sizes)
    except AutobatchError:
        return None
