"""The footprint of a step: its allocations at any micro-batch, fitted to traces at a few small ones.

    TracedStep ──record at 2, 3 and 5──► Program ──with notes and a margin──► Footprint

Tracing takes seconds and no memory, for any batch and GPU. Each trace runs in a copy of this process.

Known limitations: eager PyTorch only (a compiled model is traced as its module), and of streams those of
FSDP2. Not counted is what kernels and libraries hold for themselves, for example the workspaces of cuDNN, and
custom CUDA extensions. The interval of a prediction allows for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from torch import nn

from autobatch.core.errors import AutobatchError, InputError
from autobatch.estimates.copies import run_in_copies
from autobatch.estimates.traced_step import CONVOLUTIONS, Recording, TracedStep, record
from autobatch.footprint.program import Program, Untraceable
from autobatch.workload.contract import Collated
from autobatch.workload.rng import preserved_random_state

SIZES = (2, 3, 5)
"""Micro-batches to trace. Many operators treat 1 as special. Two sizes give a line, the third checks it."""
MARGIN = 0.03
"""Share of a budget that the lower end of an interval leaves, as no trace shows what libraries hold."""
CONVOLUTION_MARGIN = 0.1
"""The same with convolutions, because the scratch memory of cuDNN may take hundreds of MiB."""
RECURRENT = "recurrent layers: no trace shows what cuDNN keeps, so the size of their gates is counted instead"


class Unpredictable(AutobatchError, RuntimeError):  # noqa: N818 - describes the step, not a fault
    """A step whose footprint cannot be predicted, with the reason in one line."""


class Footprint(NamedTuple):
    """The allocations of a step at any micro-batch."""

    program: Program
    margin: float
    """Share of a budget by which a prediction may be too high."""
    notes: tuple[str, ...] = ()
    """Remarks for the user, one line each."""
    multiple: int = 1
    """The number whose multiples the step runs at."""


def footprint(step: TracedStep) -> Footprint:
    """Trace a step at a few small micro-batches, and fit a program to its allocations.

    Raises:
        InputError: the user's code is invalid.
        Unpredictable: the step cannot be traced, or follows no rule in the micro-batch.
    """
    (found,) = footprints([step])
    if isinstance(found, AutobatchError):
        raise found
    return found


def footprints(steps: Sequence[TracedStep]) -> list[Footprint | AutobatchError]:
    """Do as `footprint` for several steps at the same time. One that fails gives its error."""
    asked = []
    for step in steps:
        for size in SIZES:
            # Augmented data draw the same random numbers for each size.
            with preserved_random_state():
                batch = step.setup.worst_case.batch(step.multiple * size)
            # The first step of the largest size checks the two others.
            made = replace(step, steps=step.steps[:1]) if size == SIZES[-1] else step
            asked.append(partial(_recorded, made, step.multiple * size, batch))
    traced, count = run_in_copies(asked), len(SIZES)
    return [_fitted(step, traced[count * at : count * (at + 1)]) for at, step in enumerate(steps)]


def _fitted(step: TracedStep, traced: Sequence[Recording | AutobatchError]) -> Footprint | AutobatchError:
    """Fit a program to two traces, and check it with the third; return the error if that fails."""
    for found in traced:
        if isinstance(found, AutobatchError):
            return found
    small, larger, largest = (found for found in traced if isinstance(found, Recording))
    sizes = [step.multiple * size for size in SIZES]
    try:
        program = Program.fit([(sizes[0], small.trace), (sizes[1], larger.trace)])
    except Untraceable as error:
        return Unpredictable(f"cannot predict: {error}")
    if program.at(sizes[2]).events[: len(largest.trace.events)] != largest.trace.events:
        return Unpredictable("cannot predict: the sizes of its allocations are no line in the micro-batch")
    notes = sorted(small.notes)
    is_recurrent = any(isinstance(part, nn.RNNBase) for part in step.setup.model.modules())
    margin = CONVOLUTION_MARGIN if CONVOLUTIONS in notes else MARGIN
    return Footprint(program, margin, (*notes, *[RECURRENT] * is_recurrent), step.multiple)


def _recorded(step: TracedStep, size: int, batch: Collated) -> Recording | AutobatchError:
    """Trace a step at a size, on a batch that was read before; return the error if it cannot be traced."""
    try:
        return record(step, size, batch)
    except InputError as error:
        return error
    except (Exception, SystemExit) as error:
        is_odd = step.multiple == 1 and isinstance(error, AssertionError | ValueError)
        end = ". If it runs at multiples of a number only, give --micro-batch-multiple" if is_odd else ""
        if hasattr(error, "func"):  # torch's own errors of fakes
            return Unpredictable(f"cannot predict: {error.func} needs the values of the data{end}")
        kind, text = type(error).__name__, (str(error).strip().splitlines() or [""])[0][:200]
        return Unpredictable(f"cannot predict: the step does not run without values ({kind}: {text}){end}")
