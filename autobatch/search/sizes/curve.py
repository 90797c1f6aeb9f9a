"""The memory of a step over micro-batch and size: traced at a few shapes, for any other shape."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autobatch.core.errors import AutobatchError
from autobatch.core.largest import largest, near
from autobatch.device.allocator.ledger import Allocator
from autobatch.footprint.program import Untraceable
from autobatch.footprint.size_program import TRACED_STEPS, Shape, SizeProgram, fit_size_program
from autobatch.footprint.size_replay import replay_batches
from autobatch.footprint.tracing.apart import run_each_apart
from autobatch.footprint.tracing.recording import Recording
from autobatch.footprint.tracing.trace_step import Setting, record
from autobatch.workload.contract import Collated, Workload
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


class CurvePoint(NamedTuple):
    """Largest micro-batch of samples up to a size."""

    size: float
    micro_batch: int


def processor_seconds() -> float:
    """Return the seconds that processors worked for this process and for its children that have ended."""
    return sum(os.times()[:4])


def trace_sizes(
    setting: Setting, sizes: Sizes, *, clock: Callable[[], float] = processor_seconds
) -> SizeProgram:
    """Trace a step at shapes that determine its program over micro-batch and size.

    Args:
        setting: what to trace.
        sizes: size of each sample, by its index.
        clock: returns seconds of the processor, which other processes do not change.

    Raises:
        Untraceable: the step follows no such program, has too few sizes, or takes too long to trace.
        AutobatchError: the step cannot be traced.
    """
    samples = _spread(sizes)
    plan = [(m, index) for index in samples[:3] for m in (2, 3)] + [(5, samples[3])]
    # The first trace also imports what the others use, so the second one is timed.
    found = _record(setting, plan[:1])
    start = clock()
    found += _record(setting, plan[1:2])
    expected = (clock() - start) * len(plan)
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
    functions = []
    for micro_batch, index in plan:
        batch = _repeated(setting.workload, micro_batch, index)
        functions.append(partial(_recorded, setting, micro_batch, batch))
    return run_each_apart(functions)


def _repeated(workload: Workload, micro_batch: int, index: int) -> Collated:
    try:
        with preserved_random_state():
            return load_micro_batch(workload, [index] * micro_batch)
    except AutobatchError:
        raise
    except Exception as error:
        raise _untraceable(error) from error


def _recorded(setting: Setting, micro_batch: int, batch: Collated) -> Recording:
    try:
        return record(replace(setting, batch_of=lambda _: batch, steps=TRACED_STEPS), micro_batch)
    except AutobatchError:
        raise
    except Exception as error:
        raise _untraceable(error) from error


def _untraceable(error: Exception) -> Untraceable:
    return Untraceable(f"the step does not run without values ({type(error).__name__})")


def curve_of(
    program: SizeProgram,
    sizes: Sizes,
    new_allocator: Callable[[], Allocator],
    *,
    limit: int | None,
    cap: int,
) -> list[CurvePoint]:
    """Return the largest micro-batch for samples up to several sizes, in ascending order of size.

    Args:
        program: the memory of a step.
        sizes: size of each sample.
        new_allocator: returns an empty allocator with the budget as its limit.
        limit: the largest micro-batch of the largest samples, which ran; None to replay that one too.
        cap: the largest micro-batch to try.
    """
    knots = np.unique(np.quantile(sizes, np.linspace(0, 1, KNOTS + 1)[1:], method="higher"))
    found: list[CurvePoint] = []
    least, larger = limit or 1, float(knots[-1])
    for size in knots[::-1].tolist():

        def fits(m: int, size: float = size) -> bool:
            shape = Shape(m, size)
            steps = [[shape, shape]] * STEADY_STEPS
            return replay_batches(program, steps, new_allocator(), most_events=10**9).fits

        if found or limit is None:
            # Samples that are smaller fit at least as well as larger ones.
            likely = near(int(least * larger / size) if size > 0 else cap)
            least = largest(fits, least, max(cap, least) + 1, likely)
        larger = size
        found.append(CurvePoint(float(size), min(least, cap)))
    return found[::-1]
