"""Traces of a step at a few small micro-batches, and the program that is fitted to them.

The traces run in copies of this process. Those in one copy share the caches of torch. If they give no
program, each runs in a copy of its own, because user code may keep what it builds at its first call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from autobatch.core.errors import AutobatchError, InputError
from autobatch.footprint.program import Program, TooLong, Untraceable
from autobatch.footprint.tracing.apart import run_each_apart, run_in_copies
from autobatch.footprint.tracing.recording import Recording
from autobatch.footprint.tracing.trace_step import Setting, record
from autobatch.workload.contract import Collated
from autobatch.workload.rng import preserved_random_state

MULTIPLES = (2, 8)
"""Numbers that a step may insist on multiples of."""
SIZES = (2, 3, 5, 8)
"""Micro-batches to trace. Many operators treat 1 as special. Two sizes give a line, the third checks it. If
the line is wrong, three give a parabola and the fourth checks that."""


class Unpredictable(AutobatchError, RuntimeError):  # noqa: N818 - describes the step, not a fault
    """A step whose footprint cannot be predicted, with the reason in one line."""


class Refused(Unpredictable):
    """A step whose own code fails, maybe only at the sizes that were traced."""


class Fitted(NamedTuple):
    """The traces of a step, and its program."""

    first: Recording
    """At the first size."""
    program: Program
    others: list[Recording]
    """The traces of the other settings."""
    multiple: int = 1
    """The number whose multiples the step runs at."""


def fit(setting: Setting, others: Sequence[tuple[Setting, int]]) -> Fitted:
    """Fit a program to traces at the first sizes, and check it by the start of a trace at the next one.

    If the step's own code fails, multiples of these sizes are traced: it may insist on an even number.
    """
    try:
        return _fit_in_units(setting, others, 1)
    except Refused as error:
        refused = error
    for multiple in MULTIPLES:
        with suppress(Refused):
            return _fit_in_units(setting, others, multiple)
    raise refused


def _fit_in_units(setting: Setting, others: Sequence[tuple[Setting, int]], unit: int) -> Fitted:
    """Fit a program to traces at multiples of a number."""
    sizes = [unit * size for size in SIZES]
    try:
        one, two, check, *more = _first_traces(setting, sizes, others, partial(_record, run_in_copies))
        program = _fitted(sizes, one, two)
        if program.begins_with(sizes[2], check.trace):
            return Fitted(one, program, more, unit)
    except (TooLong, Refused):
        raise
    except (Untraceable, Unpredictable):
        pass
    # A trace may also have missed what an earlier one left in a cache of the user's code.
    one, two, check, *more = _first_traces(setting, sizes, others, record_apart)
    program = _fitted(sizes, one, two)
    if program.begins_with(sizes[2], check.trace):
        return Fitted(one, program, more, unit)
    three, check = record_apart((setting, sizes[2]), (_shortened(setting), sizes[3]))
    program = _fitted(sizes, one, two, three)
    if program.begins_with(sizes[3], check.trace):
        return Fitted(one, program, more, unit)
    raise Untraceable("the sizes of its allocations are no polynomial in the micro-batch")


def _first_traces(
    setting: Setting,
    sizes: Sequence[int],
    others: Sequence[tuple[Setting, int]],
    recorded: Callable[..., list[Recording]],
) -> list[Recording]:
    """Return the traces at the first two sizes, one to check them, and those of the others."""
    return recorded((setting, sizes[0]), (setting, sizes[1]), (_shortened(setting), sizes[2]), *others)


def _fitted(sizes: Sequence[int], *recordings: Recording) -> Program:
    """Fit a program to recordings at the first sizes."""
    points = [(size, one.trace) for size, one in zip(sizes, recordings, strict=False)]
    return Program.fit(points, [one.derived for one in recordings])


def _shortened(setting: Setting) -> Setting:
    """Return the first step only, which is enough for a check: all steps follow the same rule."""
    return replace(setting, steps=setting.steps[:1])


def record_apart(*traced: tuple[Setting, int]) -> list[Recording]:
    """Trace settings at sizes, each in a process of its own, from batches that are read here."""
    return _record(run_each_apart, *traced)


def _record(
    run: Callable[[Sequence[Callable[[], Recording]]], list[Recording]], *traced: tuple[Setting, int]
) -> list[Recording]:
    try:
        batches = [_batch_of(*one) for one in traced]
        _check_unpacked(batches)
        return run([partial(recorded, *one, batch) for one, batch in zip(traced, batches, strict=True)])
    except AutobatchError:
        raise
    except Exception as error:
        raise Unpredictable(f"cannot predict: {_reason(error)}") from error


def _batch_of(setting: Setting, size: int) -> Collated:
    """Read a batch. Augmented data draw the same random numbers for each size."""
    with preserved_random_state():
        return setting.batch_of(size)


def _check_unpacked(batches: list[Collated]) -> None:
    """Refuse packed sequences before anything is traced: fakes of them have no lengths."""
    leaves = tree_leaves(batches, is_leaf=lambda value: isinstance(value, PackedSequence))
    if any(isinstance(leaf, PackedSequence) for leaf in leaves):
        raise Unpredictable("cannot predict: recurrent layers read the lengths of packed sequences")


def recorded(setting: Setting, size: int, batch: Collated) -> Recording:
    """Trace a setting at a size, on a batch that was read before.

    Raises:
        TooLong: the step has more operators than it may have.
        Unpredictable: the step cannot be traced.
    """
    try:
        return record(replace(setting, batch_of=lambda _: batch), size)
    except (InputError, TooLong):
        raise
    except Exception as error:
        refuses = Refused if isinstance(error, AssertionError | ValueError) else Unpredictable
        raise refuses(f"cannot predict: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Return the reason why a step does not run on fake tensors, in one line."""
    kind = type(error).__name__
    first = (str(error).strip().splitlines() or [""])[0]
    if kind in {"DynamicOutputShapeException", "DataDependentOutputException"}:
        return f"the result of {getattr(error, 'func', first)} depends on the values of the data"
    if kind == "UnsupportedOperatorException":
        return f"{getattr(error, 'func', first)} needs the values of the data"
    return f"the step does not run without values ({kind}: {first[:200]})"
