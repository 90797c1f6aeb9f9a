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
CHANNELS_LAST = "channels_last"
OPTIMIZER = "optimizer"
LOADER_WORKERS = "loader_workers"
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
    choices: Callable[[TuningContext], tuple[Value, ...]]
    """Values to choose from, the default first; fewer than two if the knob does not apply."""
    why_not: Callable[[TuningContext], str]
    """Reason why the knob does not apply."""
    pays_off: Callable[[TuningContext], bool] = lambda _: True
    """True if the knob is tuned, or offered if it changes numbers, although the user names no knob."""
    is_exact: bool = False
    """True if no choice changes the memory of a micro-batch, or a result by rounding. Other knobs have a
    limit for each choice, and are tuned only if the user names them."""


class SearchAxis(NamedTuple):
    """Name and choices of a knob that applies, the default first."""

    name: str
    choices: tuple[Value, ...]


KNOBS = (
    Knob(
        SPLIT,  # times that the micro-batch is halved: the largest that fits is not always the fastest
        lambda here: tuple(range(min(4, here.micro_batch.bit_length()))),
        lambda _: "the micro-batch is a single sample",
        is_exact=True,
    ),
    Knob(
        PRECISION,
        lambda here: here.precisions,
        lambda _: "--precision was given, or the device has only one native precision",
    ),
    Knob(
        CHECKPOINTING,
        lambda here: ("none", "full") if here.blocks else (),
        lambda _: "the model has no repeated blocks in a ModuleList or a Sequential",
    ),
    Knob(
        COMPILE,
        lambda here: () if here.compiler else ("off", "default"),
        lambda here: str(here.compiler),
        pays_off=lambda here: here.gains_from_compile and here.planned_steps >= WORTH_COMPILING,
    ),
    Knob(
        CHANNELS_LAST,
        lambda here: (False, True) if here.images else (),
        lambda _: "the model has no 4-D weights, or its batches have no 4-D tensors",
    ),
    Knob(
        OPTIMIZER,
        lambda here: here.optimizers,
        lambda _: "the workload's optimizer has only one implementation, or the workload chose it",
    ),
    Knob(
        LOADER_WORKERS,
        lambda here: () if here.loader else (0, *(count for count in (2, 4, 8, 16) if count <= here.cores)),
        lambda here: here.loader or "this process may use a single core",
        pays_off=lambda here: here.fetch_seconds >= NOTICEABLE_S,
        is_exact=True,  # random augmentation draws other numbers, as with another seed
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
    """Return the knobs that have a choice here, and a note for each that was asked for and has none.

    Args:
        here: the device, the workload and the options.
        asked: names of knobs; None for those that are tuned by default.
    """
    if asked is None:
        return _axes(here, [knob for knob in KNOBS if knob.is_exact and knob.pays_off(here)]), []
    knobs = [knob for knob in KNOBS if knob.name in asked]
    lacking = [knob for knob in knobs if not _axes(here, [knob])]
    return _axes(here, knobs), [f"{knob.name} is not tuned: {knob.why_not(here)}" for knob in lacking]


def offered(here: TuningContext) -> list[SearchAxis]:
    """Return the knobs that change numbers and usually pay off here, with their choices."""
    return _axes(here, [knob for knob in KNOBS if not knob.is_exact and knob.pays_off(here)])


def _axes(here: TuningContext, knobs: Sequence[Knob]) -> list[SearchAxis]:
    axes = [SearchAxis(knob.name, knob.choices(here)) for knob in knobs]
    return [axis for axis in axes if len(axis.choices) > 1]


def defaults(axes: Sequence[SearchAxis]) -> dict[str, Value]:
    """Return every knob at its default."""
    return {axis.name: axis.choices[0] for axis in axes}


def memory_signature(values: Configuration) -> dict[str, Value]:
    """Return the part of a configuration that changes how large a micro-batch fits."""
    return {knob.name: values[knob.name] for knob in KNOBS if not knob.is_exact and knob.name in values}
