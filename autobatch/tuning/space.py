"""Configurations of the knobs, and the facts about a workload that decide which of them may be tried."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import torch

from autobatch.core.knobs import Configuration, SearchAxis, TuningContext, Value
from autobatch.device.host import usable_cores
from autobatch.rehearsal.setup import Setup
from autobatch.step.apply_knobs import find_blocks
from autobatch.step.optimizers import stand_in_optimizers
from autobatch.workload.feed import why_not_sent
from autobatch.workload.nested import tensors_of
from autobatch.workload.rng import preserved_random_state

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimizers with a fused step on GPUs and on the CPU."""
FETCHES = 3
"""Micro-batches that are fetched to see how long it takes."""


def changes(values: Configuration, default: Configuration) -> dict[str, Value]:
    """Return the values that differ from the default; a knob that the default lacks has none."""
    return {name: value for name, value in values.items() if value != default.get(name, value)}


def neighbours(values: Configuration, axes: Sequence[SearchAxis]) -> Iterator[dict[str, Value]]:
    """Yield the configurations that differ from one in a single knob."""
    for axis in axes:
        for choice in axis.choices:
            if choice != values[axis.name]:
                yield {**values, axis.name: choice}


def look_at_workload(
    setup: Setup, micro_batch: int, planned_steps: int, workers: int | None
) -> TuningContext:
    """Return the facts about the device and the workload that decide which knobs apply.

    Args:
        setup: has the model and the data.
        micro_batch: the largest micro-batch of the plan.
        planned_steps: optimizer steps of the run that is tuned for.
        workers: loader workers that were asked for; None if none were.
    """
    workload, device = setup.workload, setup.device
    cores = usable_cores()
    loader: str | None = "the number of workers is given"
    if workers is None:
        loader = why_not_sent(workload, setup.worst_case.batch(1))
    others = device.native_precisions() if setup.precision == "fp32" else ()
    return TuningContext(
        precisions=(setup.precision, *(name for name in others if name != setup.precision)),
        optimizers=_implementations(setup),
        blocks=len(find_blocks(setup.model)),
        images=any(p.dim() == 4 for p in setup.model.parameters())
        and any(t.dim() == 4 for t in tensors_of(setup.worst_case.batch(2))),
        compiler=device.compiler_missing(),
        micro_batch=micro_batch,
        planned_steps=planned_steps,
        cores=cores,
        loader=loader,
        fetch_seconds=_fetch_seconds(setup, micro_batch) if loader is None and cores > 1 else 0.0,
        gains_from_compile=device.gains_from_compile,
    )


def _implementations(setup: Setup) -> tuple[str, ...]:
    """Return the implementations of the workload's optimizer that are left to choose, ``default`` first."""
    made = stand_in_optimizers(setup.workload)
    if not made or any(
        optimizer.defaults.get("fused") is not None or optimizer.defaults.get("foreach", True) is not None
        for optimizer in made
    ):
        return ("default",)
    is_fusible = all(type(optimizer) in FUSED for optimizer in made)
    return tuple(name for name in setup.device.optimizer_implementations() if name != "fused" or is_fusible)


def _fetch_seconds(setup: Setup, size: int) -> float:
    """Return the median seconds that fetching and collating the most expensive micro-batch takes."""
    seconds = []
    with preserved_random_state():
        for _ in range(FETCHES):
            start = setup.clock()
            setup.worst_case.batch(size)
            seconds.append(setup.clock() - start)
    return statistics.median(seconds)
