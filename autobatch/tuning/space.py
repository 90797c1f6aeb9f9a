"""The search space: the knobs of a workload on a device, with their choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from autobatch.core.knobs import (
    CHANNELS_LAST,
    COMPILE,
    LOADER_WORKERS,
    OPTIMIZER,
    PRECISION,
    SPLIT,
    Configuration,
    Value,
)
from autobatch.device.host import usable_cores
from autobatch.rehearsal.setup import Setup
from autobatch.step.train_state import stand_in_optimizers
from autobatch.workload.nested import tensors_of
from autobatch.workload.rng import preserved_random_state

EXACT = (SPLIT, LOADER_WORKERS)
"""Knobs of which no choice changes the memory of a micro-batch, or a result by rounding. Others are tuned
only if the user names them. Workers draw other random numbers."""
NOTICEABLE_S = 0.005
"""Seconds that loading a micro-batch must take before workers are tuned by default: handing one over takes a
millisecond."""
WORTH_COMPILING = 500
"""Optimizer steps from which compiling, half a minute in each trial that tries it, may pay off."""
FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimizers with a fused step on GPUs and on the CPU."""


class Knob(NamedTuple):
    """A knob of a workload on a device."""

    name: str
    choices: tuple[Value, ...]
    """The values that it may have, the default first."""
    lacks: str = ""
    """Reason why it has one value only, or none."""
    pays_off: bool = True
    """False if it is only tuned if the user names it, and not offered."""


def knobs_of(setup: Setup, micro_batch: int, planned_steps: int, workers: int | None) -> list[Knob]:
    """Return the knobs of a plan.

    Args:
        setup: the workload and the device.
        micro_batch: that of the plan, which is the largest that may be used.
        planned_steps: optimizer steps of the run.
        workers: the loader workers that were asked for; None if none were.
    """
    device, cores = setup.device, usable_cores()
    others = device.native_precisions() if setup.precision == "fp32" else ()
    is_compiled = device.compiler_missing is None
    is_image = any(p.dim() == 4 for p in setup.model.parameters()) and any(
        tensor.dim() == 4 for tensor in tensors_of(setup.worst_case.batch(2))
    )
    counts = [count for count in (2, 4, 8, 16) if count <= cores and workers is None]
    return [
        Knob(SPLIT, tuple(range(min(4, micro_batch.bit_length()))), "the micro-batch is a single sample"),
        Knob(
            PRECISION,
            (setup.precision, *(name for name in others if name != setup.precision)),
            "--precision was given, or the device has only one native precision",
        ),
        Knob(
            COMPILE,
            ("off", "default") if is_compiled else (),
            device.compiler_missing or "",
            pays_off=device.gains_from_compile and planned_steps >= WORTH_COMPILING,
        ),
        Knob(
            CHANNELS_LAST,
            (False, True) if is_image else (),
            "the model has no 4-D weights, or its batches have no 4-D tensors",
        ),
        Knob(
            OPTIMIZER,
            _implementations(setup),
            "the workload's optimizer has only one implementation, or the workload chose it",
        ),
        Knob(
            LOADER_WORKERS,
            (0, *counts),
            "this process may use a single core" if workers is None else "the number of workers is given",
            pays_off=bool(counts) and _fetch_seconds(setup, micro_batch) >= NOTICEABLE_S,
        ),
    ]


def choose_knobs(
    knobs: Sequence[Knob], asked: Sequence[str] | None
) -> tuple[list[Knob], list[Knob], list[str]]:
    """Return the knobs to tune, those to offer, and a note for each that was asked for and has no choice.

    Args:
        knobs: all of them.
        asked: names of those to tune, and none to offer; None for those that pay off and change no number.
    """
    wanted = [knob for knob in knobs if (knob.pays_off if asked is None else knob.name in asked)]
    lacking = [knob for knob in wanted if len(knob.choices) < 2]
    tuned = [one for one in wanted if one not in lacking and (asked is not None or one.name in EXACT)]
    offered = [knob for knob in wanted if knob not in lacking and knob not in tuned]
    notes = [f"{knob.name} is not tuned: {knob.lacks}" for knob in lacking if asked is not None]
    return tuned, offered, notes


def defaults(knobs: Sequence[Knob]) -> dict[str, Value]:
    """Return every knob at its default."""
    return {knob.name: knob.choices[0] for knob in knobs}


def changes(values: Configuration, default: Configuration) -> dict[str, Value]:
    """Return the values that differ from the default."""
    return {name: value for name, value in values.items() if value != default.get(name)}


def _implementations(setup: Setup) -> tuple[str, ...]:
    """Return the implementations of the workload's optimizer that are left to choose, ``default`` first."""
    made = stand_in_optimizers(setup.workload)
    if not made or any(
        optimizer.defaults.get("fused") is not None or optimizer.defaults.get("foreach", True) is not None
        for optimizer in made
    ):
        return ("default",)
    is_fusible = all(type(optimizer) in FUSED for optimizer in made)
    return tuple(name for name in setup.device.optimizer_implementations if name != "fused" or is_fusible)


def _fetch_seconds(setup: Setup, size: int) -> float:
    """Return the seconds that fetching and collating the most expensive micro-batch takes, once warm."""
    with preserved_random_state():
        setup.worst_case.batch(size)
        start = setup.clock()
        setup.worst_case.batch(size)
        return setup.clock() - start
