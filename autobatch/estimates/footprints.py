"""The footprint of a step: its allocations at any micro-batch, fitted to traces at a few small ones.

    TracedStep ──record at 2, 3 and 5──► Program ──with notes and a margin──► Footprint

Tracing takes seconds and no memory, for any batch and GPU. Each trace runs in a copy of this process.

Known limitations: eager PyTorch only (a compiled model is traced as its module), and of streams those of
FSDP2. Not counted is what kernels and libraries hold for themselves, for example the workspaces of cuDNN, and
custom CUDA extensions. The interval of a prediction allows for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from autobatch.core.errors import AutobatchError, InputError
from autobatch.device.allocator.trace import Trace
from autobatch.estimates.copies import run_in_copies
from autobatch.estimates.recorder import CONVOLUTIONS
from autobatch.estimates.traced_step import Recording, TracedStep, record
from autobatch.footprint.program import Program, Untraceable
from autobatch.workload.contract import Collated
from autobatch.workload.rng import preserved_random_state

SIZES = (2, 3, 5, 8)
"""Micro-batches to trace. Many operators treat 1 as special. Two sizes give a line, the third checks it. If
the line is wrong, three give a parabola and the fourth checks that."""
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
    traced = _recorded_each([asked for step in steps for asked in _asked(step)[:3]])
    found: list[Footprint | AutobatchError] = []
    for number, step in enumerate(steps):
        try:
            found.append(_fitted(step, traced[3 * number : 3 * number + 3]))
        except Untraceable as error:
            found.append(Unpredictable(f"cannot predict: {error}"))
        except AutobatchError as error:
            found.append(error)
    return found


def _asked(step: TracedStep) -> list[tuple[TracedStep, int]]:
    """Return what is traced: three sizes, of which the first step of the third will do, and two more."""
    sizes, short = [step.multiple * size for size in SIZES], replace(step, steps=step.steps[:1])
    return [(step, sizes[0]), (step, sizes[1]), (short, sizes[2]), (step, sizes[2]), (short, sizes[3])]


def _fitted(step: TracedStep, first: Sequence[Recording | AutobatchError]) -> Footprint:
    """Fit a program to the first traces, or to one more.

    Raises:
        AutobatchError: a trace failed.
        Untraceable: the traces differ in more than sizes, or these are no polynomial.
    """
    asked, (small, larger, check) = _asked(step), _checked(first)
    points = [(asked[0][1], small.trace), (asked[1][1], larger.trace)]
    program = None
    with suppress(Untraceable):
        program = Program.fit(points)
    if program is None or not _begins_with(program, asked[2][1], check.trace):
        third, check = _checked(_recorded_each(asked[3:]))
        program = Program.fit([*points, (asked[3][1], third.trace)])
        if not _begins_with(program, asked[4][1], check.trace):
            raise Untraceable("the sizes of its allocations are no polynomial in the micro-batch")
    notes, is_recurrent = (
        sorted(small.notes),
        any(isinstance(part, nn.RNNBase) for part in step.model.modules()),
    )
    margin = CONVOLUTION_MARGIN if CONVOLUTIONS in notes else MARGIN
    return Footprint(program, margin, (*notes, *[RECURRENT] * is_recurrent), step.multiple)


def _checked(traced: Sequence[Recording | AutobatchError]) -> list[Recording]:
    """Return recordings, or raise the first error among them."""
    recordings = []
    for recording in traced:
        if isinstance(recording, AutobatchError):
            raise recording
        recordings.append(recording)
    return recordings


def _begins_with(program: Program, m: int, trace: Trace) -> bool:
    """Return whether the events of a program at a micro-batch begin with those of a trace."""
    return program.at(m).events[: len(trace.events)] == trace.events


def _recorded_each(asked: Sequence[tuple[TracedStep, int]]) -> list[Recording | AutobatchError]:
    """Trace steps at sizes, each in a process of its own, from batches that are read here."""
    return run_in_copies([partial(_recorded, step, size, _read(step, size)) for step, size in asked])


def _read(step: TracedStep, size: int) -> Collated | AutobatchError:
    """Read a batch. Augmented data draw the same random numbers for each size."""
    try:
        with preserved_random_state():
            batch = step.batch_of(size)
    except AutobatchError as error:
        return error
    except Exception as error:
        return _unpredictable(error)
    leaves = tree_leaves(batch, is_leaf=lambda value: isinstance(value, PackedSequence))
    if any(isinstance(leaf, PackedSequence) for leaf in leaves):
        return Unpredictable("cannot predict: recurrent layers read the lengths of packed sequences")
    return batch


def _recorded(step: TracedStep, size: int, batch: Collated | AutobatchError) -> Recording | AutobatchError:
    """Trace a step at a size, on a batch that was read before; return the error if it cannot be traced."""
    if isinstance(batch, AutobatchError):
        return batch
    try:
        return record(replace(step, batch_of=lambda _: batch), size)
    except InputError as error:
        return error
    except (Exception, SystemExit) as error:
        multiple = step.multiple == 1 and isinstance(error, AssertionError | ValueError)
        return _unpredictable(error, "give --micro-batch-multiple" * multiple)


def _unpredictable(error: BaseException, hint: str = "") -> Unpredictable:
    """Return the reason why a step does not run on fake tensors, in one line."""
    kind, text = type(error).__name__, (str(error).strip().splitlines() or [""])[0][:200]
    end = f". If it runs at multiples of a number only, {hint}" if hint else ""
    if hasattr(error, "func"):  # torch's own errors of fakes
        return Unpredictable(f"cannot predict: {error.func} needs the values of the data{end}")
    return Unpredictable(f"cannot predict: the step does not run without values ({kind}: {text}){end}")
