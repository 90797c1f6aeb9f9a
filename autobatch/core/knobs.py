"""What may be tuned: each knob says its choices, when it applies and what it does. In one place, as data.

`autobatch.step.apply_knobs` applies each to a model and its optimizer, in the same way for a probe, a
trial and the training that follows.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from autobatch.core.errors import InputError
from autobatch.core.records import Precision

Value = str | int | float | bool | None


Configuration = Mapping[str, Value]
"""A value for each knob, by name; what is missing is at its default."""


SPLIT = "micro_batch_shift"


PRECISION = "precision"


CHECKPOINTING = "checkpointing"


COMPILE = "compile"


CHANNELS_LAST = "channels_last"


OPTIMIZER = "optimizer"


LOADER_WORKERS = "loader_workers"


PREFETCH = "prefetch"


PIN_MEMORY = "pin_memory"


EXPANDABLE = "expandable_segments"


MOST_HALVINGS = 3
"""How often the micro-batch may be halved."""


MOST_WORKERS = 16


NOTICEABLE = 0.2
"""Share of a micro-batch's time that fetching it must take before workers are tried unasked."""


WORTH_COMPILING = 500
"""Optimizer steps from which half a minute of compiling, in every trial that tries it, may come back."""


class TuningContext(NamedTuple):
    """What decides which knobs apply: the device, the workload, and what was asked for."""

    precisions: tuple[Precision, ...]
    """That the device computes in natively, the default first; only one where it was asked for."""
    optimizers: tuple[str, ...]
    """Implementations of the workload's optimizer that are left to choose, ``default`` first."""
    blocks: int
    """Repeated blocks of the model."""
    images: bool
    """The model has 4-D weights, and its batches 4-D tensors."""
    compiler: str | None
    """Why ``torch.compile`` cannot work here; ``None``: it can."""
    micro_batch: int
    """The largest that the plan may use, in samples."""
    planned_steps: int
    """Optimizer steps of the run that is tuned for."""
    cores: int = 1
    """That this process may use."""
    loader: str | None = None
    """Why loader workers cannot be tuned; ``None``: they can."""
    fetch_share: float = 0.0
    """Of a micro-batch's time, what fetching and joining it takes."""
    gains_from_compile: bool = False
    """True if ``torch.compile`` is worth trying unasked on the device."""
    reads_pinned_memory: bool = False
    """True if the device copies from pinned host memory while it computes."""
    segments: str | None = "the device keeps no segments"
    """Why its allocator cannot be told to grow in expandable segments; ``None``: it can."""


class Knob(NamedTuple):
    """One thing that may be tuned."""

    name: str
    effect: str
    """What it does, for people."""
    choices: Callable[[TuningContext], tuple[Value, ...]]
    """What can be chosen, the default first; fewer than two where it does not apply."""
    why_not: Callable[[TuningContext], str]
    """Why it does not apply."""
    changes_memory: bool
    """Whether it changes what a micro-batch takes: each choice then has a limit of its own."""
    changes_numbers: bool
    """Whether it may change what is computed, be it by rounding: each choice then has its loss checked."""
    by_itself: Callable[[TuningContext], bool] = lambda _: True
    """Whether it is tuned without being asked for by name."""


class SearchAxis(NamedTuple):
    """A knob that applies, with what can be chosen here, the default first."""

    name: str
    choices: tuple[Value, ...]


def _loader_counts(here: TuningContext) -> tuple[int, ...]:
    """0 and the powers of two from 2 on that there are cores for; nothing where workers cannot serve."""
    if here.loader is not None:
        return ()
    return (0, *(1 << power for power in range(1, MOST_WORKERS.bit_length()) if 1 << power <= here.cores))


KNOBS = (
    Knob(
        SPLIT,
        "halves the micro-batch so often: the largest that fits is not always the fastest",
        lambda here: tuple(range(min(MOST_HALVINGS + 1, here.micro_batch.bit_length()))),
        lambda _: "the micro-batch is a single sample",
        changes_memory=False,
        changes_numbers=False,
    ),
    Knob(
        PRECISION,
        "what the forward pass computes in",
        lambda here: here.precisions,
        lambda _: "a precision was asked for, or the device computes natively in one alone",
        changes_memory=True,
        changes_numbers=True,
    ),
    Knob(
        CHECKPOINTING,
        "recomputes activations in the backward pass: slower a sample, and far larger micro-batches fit",
        lambda here: ("none", "full") if here.blocks else (),
        lambda _: "the model has no repeated blocks in a ModuleList or a Sequential",
        changes_memory=True,
        changes_numbers=True,
    ),
    Knob(
        COMPILE,
        "torch.compile: fused kernels, after a while of compiling that is spread over the planned steps",
        lambda here: ("off", "default") if here.compiler is None else (),
        lambda here: str(here.compiler),
        changes_memory=True,
        changes_numbers=True,
        by_itself=lambda here: here.gains_from_compile and here.planned_steps >= WORTH_COMPILING,
    ),
    Knob(
        CHANNELS_LAST,
        "keeps images and convolutions with their channels innermost, as fast kernels want them",
        lambda here: (False, True) if here.images else (),
        lambda _: "the model has no 4-D weights, or its batches no 4-D tensors",
        changes_memory=True,
        changes_numbers=True,
    ),
    Knob(
        OPTIMIZER,
        "how the optimizer steps: parameter by parameter, in lists, or in one fused kernel",
        lambda here: here.optimizers,
        lambda _: "the workload's optimizer has one implementation, or has chosen it",
        changes_memory=True,
        changes_numbers=True,
    ),
    Knob(
        LOADER_WORKERS,
        "processes that fetch and join the next micro-batches while this one trains",
        _loader_counts,
        lambda here: here.loader or "this process may use a single core",
        changes_memory=False,
        # Of what data draw at random other draws are made, as by another seed; the loss is the same function.
        changes_numbers=False,
        by_itself=lambda here: here.fetch_share >= NOTICEABLE,
    ),
    Knob(
        PREFETCH,
        "micro-batches that each loader worker is ahead by: evens out samples that take unlike times",
        lambda here: (2, 4, 8) if len(_loader_counts(here)) > 1 else (),
        lambda here: here.loader or "this process may use a single core",
        changes_memory=False,
        changes_numbers=False,
        # It makes no worker faster, and its worth shows over more windows than a trial runs.
        by_itself=lambda _: False,
    ),
    Knob(
        PIN_MEMORY,
        "has what workers joined copied to where a card reads it by itself, while it computes",
        lambda here: (True, False) if here.reads_pinned_memory and len(_loader_counts(here)) > 1 else (),
        lambda here: here.loader or "it serves cards, and workers that feed them",
        changes_memory=False,
        changes_numbers=False,
        # On is right wherever the host has memory to lock.
        by_itself=lambda _: False,
    ),
    Knob(
        EXPANDABLE,
        "lets the allocator's segments grow: less is lost between blocks, and larger micro-batches may fit",
        lambda here: (False, True) if here.segments is None else (),
        lambda here: str(here.segments),
        changes_memory=True,
        changes_numbers=False,
    ),
)


LEFT_OUT = {
    "learning_rate": "throughput does not depend on it: --tune-lr has a study of its own",
}
"""What people look for here and do not find, and why."""


def parse_knobs(text: str) -> list[str]:
    """The names in ``micro_batch_shift,precision``, as ``--knobs`` takes them.

    Raises:
        InputError: a name is none of a knob, or is left out for a reason; says which, and what is near.
    """
    names = [name.strip().replace("-", "_") for name in text.split(",")]
    known = [knob.name for knob in KNOBS]
    for name in names:
        if name in LEFT_OUT:
            raise InputError(f"{name} is not tuned: {LEFT_OUT[name]}")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
            raise InputError(f"there is no knob {name!r}; {hint}")
    return list(dict.fromkeys(names))


def applicable(here: TuningContext, asked: Sequence[str] | None = None) -> tuple[list[SearchAxis], list[str]]:
    """The knobs that make a difference here.

    Args:
        here: the device, the workload and the options.
        asked: names of knobs; ``None``: all that are tuned without being asked for.

    Returns:
        Each with what can be chosen; and a line for each that was asked for and does not apply.
    """
    axes: list[SearchAxis] = []
    notes: list[str] = []
    for knob in KNOBS:
        if not (knob.by_itself(here) if asked is None else knob.name in asked):
            continue
        choices = knob.choices(here)
        if len(choices) > 1:
            axes.append(SearchAxis(knob.name, choices))
        elif asked is not None:
            notes.append(f"{knob.name} is not tuned: {knob.why_not(here)}")
    return axes, notes


def defaults(axes: Sequence[SearchAxis]) -> dict[str, Value]:
    """Every knob at its default."""
    return {axis.name: axis.choices[0] for axis in axes}


def memory_signature(values: Configuration) -> dict[str, Value]:
    """The part of a configuration that decides how large a micro-batch fits."""
    return {knob.name: values[knob.name] for knob in KNOBS if knob.changes_memory and knob.name in values}


def numeric_signature(values: Configuration) -> dict[str, Value]:
    """The part of a configuration that decides what is computed."""
    return {knob.name: values[knob.name] for knob in KNOBS if knob.changes_numbers and knob.name in values}
