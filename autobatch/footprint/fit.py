"""The footprint of a step: its allocations at any micro-batch, fitted to traces at a few small ones.

    Setting ──record at 2, 3 and 5──► Program ──with labels and notes──► Footprint

Tracing takes seconds and no memory, for any batch and GPU. The traces run in copies of this process. Those in
one copy share the caches of torch. If they give no program, each runs in a copy of its own, because user code
may keep what it builds at its first call.

Known limitations: eager PyTorch only (a compiled model is traced as its module) and one stream. Not counted
are cuDNN's scratch memory for convolutions, memory of its recurrent layers beyond their gates, temporaries
inside sorting kernels (also behind the gradient of an embedding of more than 3,072 tokens), and custom CUDA
extensions. The interval of a prediction allows for the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from autobatch.core.errors import AutobatchError, InputError
from autobatch.footprint.program import Program, TooLong, Untraceable
from autobatch.footprint.tracing.apart import run_each_apart, run_in_copies
from autobatch.footprint.tracing.cuda_policy import missing_parts
from autobatch.footprint.tracing.trace_mode import Label, Product, Recording
from autobatch.footprint.tracing.trace_step import Setting, record
from autobatch.workload.contract import Collated
from autobatch.workload.rng import preserved_random_state

MULTIPLES = (1, 2, 8)
"""Numbers that a step may insist on multiples of."""
SIZES = (2, 3, 5, 8)
"""Micro-batches to trace. Many operators treat 1 as special. Two sizes give a line, the third checks it. If
the line is wrong, three give a parabola and the fourth checks that."""
MARGIN = 0.03
"""Share of a budget by which a prediction may be too high."""
CONVOLUTION_MARGIN = 0.1
"""The same with convolutions, because no trace shows cuDNN's scratch memory."""


class Unpredictable(AutobatchError, RuntimeError):  # noqa: N818 - describes the step, not a fault
    """A step whose footprint cannot be predicted, with the reason in one line."""


class Refused(Unpredictable):
    """A step whose own code fails, maybe only at the sizes that were traced."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The allocations of a step at any micro-batch."""

    program: Program
    labels: tuple[Label, ...]
    """By block number."""
    products: tuple[Product, ...]
    margin: float
    """Share of a budget by which a prediction may be too high."""
    notes: tuple[str, ...] = ()
    """Remarks for the user, one line each."""
    multiple: int = 1
    """The number whose multiples the step runs at."""


def footprint(setting: Setting) -> Footprint:
    """Trace a step at a few small micro-batches, and fit a program to its allocations.

    Raises:
        Unpredictable: the step cannot be traced, or follows no rule in the micro-batch.
    """
    return footprint_beside(setting, ())[0]


def footprint_beside(
    setting: Setting, others: Sequence[tuple[Setting, int]]
) -> tuple[Footprint, list[Recording]]:
    """Do as `footprint`, and at the same time record other settings, each at a micro-batch.

    If the step's own code fails, multiples of the sizes are traced: it may insist on an even number.

    Raises:
        Unpredictable: a step cannot be traced, or that of the first setting follows no rule.
    """
    missing = missing_parts()
    if missing:
        raise Unpredictable(f"cannot predict: this torch has no {', '.join(missing)}")
    refused: Refused | None = None
    for multiple in MULTIPLES:
        try:
            program, first, recordings = _fit(setting, others, multiple)
        except Refused as error:
            refused = refused or error
        except TooLong:
            raise
        except Untraceable as error:
            raise Unpredictable(f"cannot predict: {error}") from error
        else:
            notes = notes_on(setting, first)
            if multiple > 1:
                notes.append(f"the step fails at other sizes, so only multiples of {multiple} are predicted")
            margin = CONVOLUTION_MARGIN if first.has_convolutions else MARGIN
            step = Footprint(
                program=program,
                labels=first.labels,
                products=first.products,
                margin=margin,
                notes=tuple(notes),
                multiple=multiple,
            )
            return step, recordings
    assert refused is not None
    raise refused


def _fit(
    setting: Setting, others: Sequence[tuple[Setting, int]], multiple: int
) -> tuple[Program, Recording, list[Recording]]:
    """Fit a program to traces at the first sizes, and check it by the start of a trace at the next one.

    Returns:
        The program, the trace at the first size, and those of other settings.
    """
    sizes = [multiple * size for size in SIZES]
    # One step is enough for a check: all steps follow the same rule.
    short = replace(setting, steps=setting.steps[:1])
    wanted = [(setting, sizes[0]), (setting, sizes[1]), (short, sizes[2]), *others]
    try:
        one, two, check, *more = record_apart(*wanted, run=run_in_copies)
        program = _fitted(sizes, one, two)
        if program.begins_with(sizes[2], check.trace):
            return program, one, more
    except (TooLong, Refused):
        raise
    except (Untraceable, Unpredictable):
        pass
    # A trace may also have missed what an earlier one left in a cache of the user's code.
    one, two, check, *more = record_apart(*wanted)
    program = _fitted(sizes, one, two)
    if program.begins_with(sizes[2], check.trace):
        return program, one, more
    three, check = record_apart((setting, sizes[2]), (short, sizes[3]))
    program = _fitted(sizes, one, two, three)
    if program.begins_with(sizes[3], check.trace):
        return program, one, more
    raise Untraceable("the sizes of its allocations are no polynomial in the micro-batch")


def _fitted(sizes: Sequence[int], *recordings: Recording) -> Program:
    """Fit a program to recordings at the first sizes."""
    points = [(size, one.trace) for size, one in zip(sizes, recordings, strict=False)]
    return Program.fit(points, [one.derived for one in recordings])


def record_apart(
    *traced: tuple[Setting, int],
    run: Callable[[Sequence[Callable[[], Recording]]], list[Recording]] = run_each_apart,
) -> list[Recording]:
    """Trace settings at sizes, each in a process of its own, from batches that are read here."""
    try:
        batches = [_batch_of(*one) for one in traced]
    except AutobatchError:
        raise
    except Exception as error:
        raise Unpredictable(f"cannot predict: {_reason(error)}") from error
    leaves = tree_leaves(batches, is_leaf=lambda value: isinstance(value, PackedSequence))
    if any(isinstance(leaf, PackedSequence) for leaf in leaves):
        raise Unpredictable("cannot predict: recurrent layers read the lengths of packed sequences")
    return run([partial(recorded, *one, batch) for one, batch in zip(traced, batches, strict=True)])


def _batch_of(setting: Setting, size: int) -> Collated:
    """Read a batch. Augmented data draw the same random numbers for each size."""
    with preserved_random_state():
        return setting.batch_of(size)


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


def notes_on(setting: Setting, recording: Recording) -> list[str]:
    """Return remarks on what a trace does not show, one per line."""
    notes = []
    if recording.has_convolutions:
        notes.append(
            "convolutions: no trace shows the scratch memory of cuDNN, so the interval allows 10 % for it"
        )
    if recording.has_selections:
        notes.append(
            "selections by values: predicted as if they kept everything, which is their largest result"
        )
    if recording.has_reads:
        notes.append("values that NumPy reads from tensors: predicted as if all of them were alike")
    if any(isinstance(module, nn.RNNBase) for module in setting.model.modules()):
        notes.append(
            "recurrent layers: no trace shows what cuDNN keeps, so the size of their gates is counted instead"
        )
    if hasattr(setting.model, "_orig_mod"):
        notes.append("a compiled model: predicted as if it were not compiled, which needs more memory")
    return notes
