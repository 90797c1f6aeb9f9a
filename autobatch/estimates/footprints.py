"""The footprint of a step: its allocations at any micro-batch, fitted to traces at a few small ones.

    TracedStep ──record at 2, 3 and 5──► Program ──with notes and a margin──► Footprint

Tracing takes seconds and no memory, for any batch and GPU. Each trace runs in a copy of this process.

Known limitations: eager PyTorch only (a compiled model is traced as its module) and one stream. Not counted
is what kernels and libraries hold for themselves, for example the workspaces of cuDNN, and custom CUDA
extensions. The interval of a prediction allows for it.
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
from autobatch.footprint.program import Polynomial, Program, Untraceable
from autobatch.workload.contract import Collated
from autobatch.workload.rng import preserved_random_state

SIZES = (2, 3, 5, 8)
"""Micro-batches to trace. Many operators treat 1 as special. Two sizes give a line, the third checks it. If
the line is wrong, three give a parabola and the fourth checks that."""
MARGIN = 0.03
"""Share of a budget that the lower end of an interval leaves, as no trace shows what libraries hold."""
CONVOLUTION_MARGIN = 0.1
"""The same with convolutions, because the scratch memory of cuDNN may take hundreds of MiB."""


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
    is_line: bool = True
    """True if all sizes are lines in the micro-batch."""
    is_for_all: bool = True
    """True if GPUs of all generations run the same kernels."""
    only: int | None = None
    """The one micro-batch at which the program is valid; None if it is valid at all."""


def footprint(step: TracedStep, only: int | None = None) -> Footprint:
    """Trace a step at a few small micro-batches, and fit a program to its allocations.

    Args:
        step: what to trace.
        only: the micro-batch that is asked about, at which a step is traced that follows no rule; None if all
            are.

    Raises:
        InputError: the user's code is invalid.
        Unpredictable: the step cannot be traced, or follows no rule in the micro-batch.
    """
    (found,) = footprints([step], only)
    if isinstance(found, AutobatchError):
        raise found
    return found


def footprints(
    steps: Sequence[TracedStep], only: int | None = None, *, are_lines: bool = False
) -> list[Footprint | AutobatchError]:
    """Do as `footprint` for several steps at the same time. One that fails gives its error.

    Args:
        steps: what to trace.
        only: the micro-batch that is asked about; None if all are.
        are_lines: True if their sizes are known to be lines in the micro-batch, which no third trace checks.
    """
    count = 2 if are_lines else 3
    traced = recorded_each([one for step in steps for one in _first_traces(step)[:count]])
    found: list[Footprint | AutobatchError] = []
    for step in steps:
        first, traced = traced[:count], traced[count:]
        fitted: Footprint | AutobatchError
        try:
            fitted = _fitted(step, first)
        except Untraceable as error:
            fitted = Unpredictable(f"cannot predict: {error}")
        except AutobatchError as error:
            fitted = error
        if only is not None and isinstance(fitted, Unpredictable):
            fitted = _at_one_size(step, only)
        found.append(fitted)
    return found


def _first_traces(step: TracedStep) -> list[tuple[TracedStep, int]]:
    """Return what is traced first: two sizes, and the first step at a third one, as all follow one rule."""
    small, larger, check, _ = sizes_of(step)
    return [(step, small), (step, larger), (replace(step, steps=step.steps[:1]), check)]


def sizes_of(step: TracedStep) -> list[int]:
    """Return the micro-batches to trace."""
    return [step.multiple * size for size in SIZES]


def _fitted(step: TracedStep, first: Sequence[Recording | AutobatchError]) -> Footprint:
    """Fit a program to the first traces, or to one more.

    Raises:
        AutobatchError: a trace failed.
        Untraceable: the traces differ in more than sizes, or these are no polynomial.
    """
    small, larger, *check = _checked(first)
    sizes = sizes_of(step)
    points = [(sizes[0], small.trace), (sizes[1], larger.trace)]
    program = None
    with suppress(Untraceable):
        program = Program.fit(points)
    if program is None or not all(_begins_with(program, sizes[2], one.trace) for one in check):
        short = replace(step, steps=step.steps[:1])
        third, last = _checked(recorded_each([(step, sizes[2]), (short, sizes[3])]))
        program = Program.fit([*points, (sizes[2], third.trace)])
        if not _begins_with(program, sizes[3], last.trace):
            raise Untraceable("the sizes of its allocations are no polynomial in the micro-batch")
    is_line = all(
        rule is None or (isinstance(rule, Polynomial) and not rule.square and rule.granule == 1)
        for _, rule in program.events
    )
    notes = (*sorted(small.notes), *_notes_on(step.model))
    return Footprint(program, _margin(small), notes, step.multiple, is_line, small.is_for_all)


def _at_one_size(step: TracedStep, only: int) -> Footprint | AutobatchError:
    """Trace a step at the one micro-batch that is asked about."""
    (traced,) = recorded_each([(step, only)])
    if isinstance(traced, AutobatchError):
        return traced
    notes = (
        f"the step does other work at other micro-batches, so this holds for {only} only",
        *sorted(traced.notes),
        *_notes_on(step.model),
    )
    return Footprint(Program.of(traced.trace), _margin(traced), notes, is_line=False, only=only)


def _margin(traced: Recording) -> float:
    return CONVOLUTION_MARGIN if CONVOLUTIONS in traced.notes else MARGIN


def _checked(traced: Sequence[Recording | AutobatchError]) -> list[Recording]:
    """Return recordings, or raise the first error among them."""
    for one in traced:
        if isinstance(one, AutobatchError):
            raise one
    return [one for one in traced if isinstance(one, Recording)]


def _begins_with(program: Program, m: int, trace: Trace) -> bool:
    """Return whether the events of a program at a micro-batch begin with those of a trace."""
    try:
        return program.at(m).events[: len(trace.events)] == trace.events
    except Untraceable:
        return False


def recorded_each(asked: Sequence[tuple[TracedStep, int]]) -> list[Recording | AutobatchError]:
    """Trace steps at sizes, each in a process of its own, from batches that are read here."""
    batches = [_read(step, size) for step, size in asked]
    return run_in_copies([partial(_recorded, *one, batch) for one, batch in zip(asked, batches, strict=True)])


def _read(step: TracedStep, size: int) -> Collated | AutobatchError:
    """Read a batch. Augmented data draw the same random numbers for each size."""
    try:
        with preserved_random_state():
            batch = step.batch_of(size)
    except AutobatchError as error:
        return error
    except Exception as error:
        return Unpredictable(f"cannot predict: {_reason(error)}")
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
        hint = ". If it runs at multiples of a number only, give --micro-batch-multiple" if multiple else ""
        return Unpredictable(f"cannot predict: {_reason(error)}{hint}")


def _reason(error: BaseException) -> str:
    """Return the reason why a step does not run on fake tensors, in one line."""
    kind = type(error).__name__
    first = (str(error).strip().splitlines() or [""])[0]
    if kind in {"DynamicOutputShapeException", "DataDependentOutputException"}:
        return f"the result of {getattr(error, 'func', first)} depends on the values of the data"
    if kind == "UnsupportedOperatorException":
        return f"{getattr(error, 'func', first)} needs the values of the data"
    return f"the step does not run without values ({kind}: {first[:200]})"


def _notes_on(model: nn.Module) -> list[str]:
    notes = []
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        notes.append(
            "recurrent layers: no trace shows what cuDNN keeps, so the size of their gates is counted instead"
        )
    if hasattr(model, "_orig_mod"):
        notes.append("a compiled model: predicted as if it were not compiled, which needs more memory")
    return notes
