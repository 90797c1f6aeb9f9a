"""Traces of a step at a few small micro-batches, and the program that is fitted to them.

The traces run in copies of this process. Those in one copy share the caches of torch. If they give no
program, each runs in a copy of its own, because user code may keep what it builds at its first call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from autobatch.core.errors import AutobatchError, InputError
from autobatch.footprint.program import Program, TooLong, Untraceable
from autobatch.footprint.tracing.apart import run_each_apart, run_in_copies
from autobatch.footprint.tracing.recording import Recording
from autobatch.footprint.tracing.trace_step import Setting, record
from autobatch.workload.contract import Collated
from autobatch.workload.rng import preserved_random_state

SIZES = (2, 3, 5, 8)
"""Micro-batches to trace. Many operators treat 1 as special. Two sizes give a line, the third checks it. If
the line is wrong, three give a parabola and the fourth checks that."""


class Unpredictable(AutobatchError, RuntimeError):  # noqa: N818 - describes the step, not a fault
    """A step whose footprint cannot be predicted, with the reason in one line."""


def fit(
    setting: Setting, others: Sequence[tuple[Setting, int]]
) -> tuple[Recording, Program, list[Recording]]:
    """Fit a program to traces at the first sizes, and check it by the start of a trace at the next one.

    Returns:
        The trace at the first size, the program, and the traces of the other settings.
    """
    try:
        one, two, check, more = _first_traces(setting, others, partial(_record, run_in_copies))
        program = _fitted(one, two)
        if program.begins_with(SIZES[2], check.trace):
            return one, program, more
    except TooLong:
        raise
    except (Untraceable, Unpredictable):
        pass
    # A trace may also have missed what an earlier one left in a cache of the user's code.
    one, two, check, more = _first_traces(setting, others, record_apart)
    program = _fitted(one, two)
    if program.begins_with(SIZES[2], check.trace):
        return one, program, more
    three, check = record_apart((setting, SIZES[2]), (_shortened(setting), SIZES[3]))
    program = _fitted(one, two, three)
    if program.begins_with(SIZES[3], check.trace):
        return one, program, more
    raise Untraceable("the sizes of its allocations are no polynomial in the micro-batch")


def _first_traces(
    setting: Setting, others: Sequence[tuple[Setting, int]], recorded: Callable[..., list[Recording]]
) -> tuple[Recording, Recording, Recording, list[Recording]]:
    """Return the traces at the first two sizes, one to check them, and those of the others."""
    small, large, third, _ = SIZES
    one, two, check, *more = recorded(
        (setting, small), (setting, large), (_shortened(setting), third), *others
    )
    return one, two, check, more


def _fitted(*recordings: Recording) -> Program:
    """Fit a program to recordings at the first sizes."""
    points = [(size, one.trace) for size, one in zip(SIZES, recordings, strict=False)]
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
        raise Unpredictable(f"cannot predict: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Return the reason why a step does not run on fake tensors, in one line."""
    kind = type(error).__name__
    first = (str(error).strip().splitlines() or [""])[0]
    if kind in {"DynamicOutputShapeException", "DataDependentOutputException"}:
        return f"the result of {getattr(error, 'func', first)} depends on the values of the data"
    if kind == "UnsupportedOperatorException":
        return f"{getattr(error, 'func', first)} needs the values of the data"
    return f"the step does not run without values ({kind}: {first[:200]})"
