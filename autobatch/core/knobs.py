"""The knobs of the tuner, as data: the choices of each, and which of them are tried unasked.

`autobatch.step.apply_knobs` applies them to a model and its optimizer, in the same way for a probe, a trial
and the training that follows.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from autobatch.core.errors import InputError
from autobatch.core.records import Precision

Value = str | int | float | bool | None
Configuration = Mapping[str, Value]
"""Value of each knob, by name; a knob that is missing has its default."""
SPLIT = "micro_batch_shift"
PRECISION = "precision"
CHECKPOINTING = "checkpointing"
"""No choice of the tuner: `autobatch.estimates` says what would fit with it."""
COMPILE = "compile"
CHANNELS_LAST = "channels_last"
OPTIMIZER = "optimizer"
LOADER_WORKERS = "loader_workers"
KNOBS = {
    SPLIT: "the micro-batch is a single sample",
    PRECISION: "--precision was given, or the device has only one native precision",
    COMPILE: "torch.compile does not work here",
    CHANNELS_LAST: "the model has no 4-D weights, or its batches have no 4-D tensors",
    OPTIMIZER: "the workload's optimizer has only one implementation, or the workload chose it",
    LOADER_WORKERS: "this process may use a single core",
}
"""Names of the knobs, and the reason why each may not apply, unless the context knows a better one."""
EXACT = (SPLIT, LOADER_WORKERS)
"""Knobs of which no choice changes the memory of a micro-batch, or a result by rounding. Others are tuned
only if the user names them. Workers draw other random numbers."""
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

    def choices(self, name: str) -> tuple[Value, ...]:
        """Return the values of a knob, the default first; fewer than two if it does not apply."""
        cores = (count for count in (2, 4, 8, 16) if count <= self.cores)
        known: dict[str, tuple[Value, ...]] = {
            # Times that the micro-batch is halved: the largest that fits is not always the fastest.
            SPLIT: tuple(range(min(4, self.micro_batch.bit_length()))),
            PRECISION: self.precisions,
            COMPILE: ("off", "default", "reduce-overhead")[: 2 + self.gains_from_compile],
            CHANNELS_LAST: (False, True) if self.images else (),
            OPTIMIZER: self.optimizers,
            LOADER_WORKERS: (0, *cores),
        }
        return () if self.obstacle(name) else known[name]

    def obstacle(self, name: str) -> str | None:
        """Return the reason why a knob that may have choices cannot be tuned; None if it can."""
        return {COMPILE: self.compiler, LOADER_WORKERS: self.loader}.get(name)

    def pays_off(self, name: str) -> bool:
        """Return whether a knob is tuned, or offered if it changes numbers, although the user names none."""
        if name == COMPILE:
            return self.gains_from_compile and self.planned_steps >= WORTH_COMPILING
        return name != LOADER_WORKERS or self.fetch_seconds >= NOTICEABLE_S


class SearchAxis(NamedTuple):
    """Name and choices of a knob that applies, the default first."""

    name: str
    choices: tuple[Value, ...]


def parse_knobs(text: str) -> list[str]:
    """Split the value of ``--knobs`` (``micro_batch_shift,precision``) into names.

    Raises:
        InputError: no knob has this name; the message gives the nearest name.
    """
    names = [name.strip().replace("-", "_") for name in text.split(",")]
    for name in names:
        if name not in KNOBS:
            near = difflib.get_close_matches(name, KNOBS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(KNOBS)}"
            raise InputError(f"there is no knob {name!r}; {hint}")
    return list(dict.fromkeys(names))


def applicable(here: TuningContext, asked: Sequence[str] | None = None) -> tuple[list[SearchAxis], list[str]]:
    """Return the knobs that have a choice here, and a note for each that was asked for and has none.

    Args:
        here: the device, the workload and the options.
        asked: names of knobs; None for those that are tuned by default.
    """
    if asked is None:
        return _axes(here, filter(here.pays_off, EXACT)), []
    axes = _axes(here, [name for name in KNOBS if name in asked])
    lacking = [name for name in KNOBS if name in asked and name not in {axis.name for axis in axes}]
    return axes, [f"{name} is not tuned: {here.obstacle(name) or KNOBS[name]}" for name in lacking]


def offered(here: TuningContext) -> list[SearchAxis]:
    """Return the knobs that change numbers and usually pay off here, with their choices."""
    return _axes(here, [name for name in KNOBS if name not in EXACT and here.pays_off(name)])


def _axes(here: TuningContext, names: Iterable[str]) -> list[SearchAxis]:
    axes = [SearchAxis(name, here.choices(name)) for name in names]
    return [axis for axis in axes if len(axis.choices) > 1]


def defaults(axes: Sequence[SearchAxis]) -> dict[str, Value]:
    """Return every knob at its default."""
    return {axis.name: axis.choices[0] for axis in axes}
