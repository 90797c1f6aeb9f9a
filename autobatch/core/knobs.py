"""The knobs of the tuner, as data: the choices of each, when it applies and what it does.

`autobatch.step.apply_knobs` applies them to a model and its optimizer, in the same way for a probe, a trial
and the training that follows.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from autobatch.core.errors import InputError
from autobatch.core.records import Precision

Value = str | int | float | bool | None
Configuration = Mapping[str, Value]
"""Value of each knob, by name; a knob that is missing has its default."""
SPLIT = "micro_batch_shift"
PRECISION = "precision"
CHECKPOINTING = "checkpointing"
COMPILE = "compile"
COMPILE_MODES = ("off", "default", "reduce-overhead")
"""Choices of that knob; the last, CUDA graphs, on GPUs only."""
CHANNELS_LAST = "channels_last"
OPTIMIZER = "optimizer"
LOADER_WORKERS = "loader_workers"
MOST_HALVINGS = 3
"""Times that the micro-batch may be halved."""
MOST_WORKERS = 16
NOTICEABLE_S = 0.005
"""Seconds that loading a micro-batch must take before workers are tuned by default: handing one over takes a
millisecond."""
WORTH_COMPILING = 500
"""Optimizer steps from which compiling, half a minute in each trial that tries it, may pay off."""


class TuningContext(NamedTuple):
    """Facts that decide which knobs apply: the device, the workload and the options."""

    precisions: tuple[Precision, ...]
    """Precisions that the device computes in natively, the default first; only one if the user chose it."""
    optimizers: tuple[str, ...]
    """Implementations of the workload's optimizer to choose from, ``default`` first."""
    blocks: int
    """Number of repeated blocks of the model."""
    images: bool
    """True if the model has 4-D weights and its batches 4-D tensors."""
    compiler: str | None
    """Reason why ``torch.compile`` does not work here; None if it does."""
    micro_batch: int
    """Largest micro-batch that the plan may use."""
    planned_steps: int
    """Optimizer steps of the run to tune for."""
    cores: int = 1
    """Cores that this process may use."""
    loader: str | None = None
    """Reason why loader workers cannot be tuned; None if they can."""
    fetch_seconds: float = 0.0
    """Time that fetching and collating a micro-batch takes."""
    gains_from_compile: bool = False
    """True if ``torch.compile`` is worth trying unasked on the device."""


class Knob(NamedTuple):
    """One setting that may be tuned."""

    name: str
    effect: str
    """Effect of the knob, in words."""
    choices: Callable[[TuningContext], tuple[Value, ...]]
    """Values to choose from, the default first; fewer than two if the knob does not apply."""
    why_not: Callable[[TuningContext], str]
    """Reason why the knob does not apply."""
    changes_memory: bool
    """True if a choice changes the memory of a micro-batch; each choice then has its own limit."""
    changes_numbers: bool
    """True if a choice may change results, even by rounding only. It is chosen only if the user names the
    knob."""
    is_default: Callable[[TuningContext], bool] = lambda _: True
    """True if the knob is tuned, or offered if it changes numbers, although the user names no knob."""


class SearchAxis(NamedTuple):
    """Name and choices of a knob that applies, the default first."""

    name: str
    choices: tuple[Value, ...]


def _loader_counts(here: TuningContext) -> tuple[int, ...]:
    """Return 0 and the powers of two from 2 up to the cores; nothing if workers cannot be used."""
    if here.loader is not None:
        return ()
    return (0, *(1 << power for power in range(1, MOST_WORKERS.bit_length()) if 1 << power <= here.cores))


KNOBS = (
    Knob(
        SPLIT,
        "halves the micro-batch this many times: the largest that fits is not always the fastest",
        lambda here: tuple(range(min(MOST_HALVINGS + 1, here.micro_batch.bit_length()))),
        lambda _: "the micro-batch is a single sample",
        changes_memory=False,
        changes_numbers=False,
    ),
    Knob(
        PRECISION,
        "precision of the forward pass",
        lambda here: here.precisions,
        lambda _: "--precision was given, or the device has only one native precision",
        changes_memory=True,
        changes_numbers=True,
    ),
    Knob(
        CHECKPOINTING,
        "recomputes activations in the backward pass: slower per sample, but much larger micro-batches fit",
        lambda here: ("none", "full") if here.blocks else (),
        lambda _: "the model has no repeated blocks in a ModuleList or a Sequential",
        changes_memory=True,
        changes_numbers=True,
    ),
    Knob(
        COMPILE,
        "torch.compile: fused kernels, and with reduce-overhead CUDA graphs; the time of compiling is spread "
        "over the planned steps",
        lambda here: () if here.compiler else COMPILE_MODES if here.gains_from_compile else COMPILE_MODES[:2],
        lambda here: str(here.compiler),
        changes_memory=True,
        changes_numbers=True,
        is_default=lambda here: here.gains_from_compile and here.planned_steps >= WORTH_COMPILING,
    ),
    Knob(
        CHANNELS_LAST,
        "stores images and convolutions with channels innermost, as fast kernels expect",
        lambda here: (False, True) if here.images else (),
        lambda _: "the model has no 4-D weights, or its batches have no 4-D tensors",
        changes_memory=True,
        changes_numbers=True,
    ),
    Knob(
        OPTIMIZER,
        "implementation of the optimizer step: parameter by parameter, in lists, or in one fused kernel",
        lambda here: here.optimizers,
        lambda _: "the workload's optimizer has only one implementation, or the workload chose it",
        changes_memory=True,
        changes_numbers=True,
    ),
    Knob(
        LOADER_WORKERS,
        "processes that fetch and collate the next micro-batches while the current one trains",
        _loader_counts,
        lambda here: here.loader or "this process may use a single core",
        changes_memory=False,
        # Random augmentation draws other numbers, as with another seed; the loss is the same function.
        changes_numbers=False,
        is_default=lambda here: here.fetch_seconds >= NOTICEABLE_S,
    ),
)


def parse_knobs(text: str) -> list[str]:
    """Split the value of ``--knobs`` (``micro_batch_shift,precision``) into names.

    Raises:
        InputError: no knob has this name; the message gives the nearest name.
    """
    names = [name.strip().replace("-", "_") for name in text.split(",")]
    known = [knob.name for knob in KNOBS]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
            raise InputError(f"there is no knob {name!r}; {hint}")
    return list(dict.fromkeys(names))


def applicable(here: TuningContext, asked: Sequence[str] | None = None) -> tuple[list[SearchAxis], list[str]]:
    """Return the knobs that have at least two choices here.

    Args:
        here: the device, the workload and the options.
        asked: names of knobs; None for those that are tuned by default.

    Returns:
        The knobs with their choices, and one note per knob that was asked for and does not apply.
    """
    axes: list[SearchAxis] = []
    notes: list[str] = []
    for knob in KNOBS:
        is_unasked = knob.is_default(here) and not knob.changes_numbers
        if not (is_unasked if asked is None else knob.name in asked):
            continue
        choices = knob.choices(here)
        if len(choices) > 1:
            axes.append(SearchAxis(knob.name, choices))
        elif asked is not None:
            notes.append(f"{knob.name} is not tuned: {knob.why_not(here)}")
    return axes, notes


def offered(here: TuningContext) -> list[SearchAxis]:
    """Return the knobs that change numbers and usually pay off here, with their choices."""
    axes = [
        SearchAxis(one.name, one.choices(here))
        for one in KNOBS
        if one.changes_numbers and one.is_default(here)
    ]
    return [axis for axis in axes if len(axis.choices) > 1]


def defaults(axes: Sequence[SearchAxis]) -> dict[str, Value]:
    """Return every knob at its default."""
    return {axis.name: axis.choices[0] for axis in axes}


def memory_signature(values: Configuration) -> dict[str, Value]:
    """Return the part of a configuration that changes how large a micro-batch fits."""
    return {knob.name: values[knob.name] for knob in KNOBS if knob.changes_memory and knob.name in values}
