"""Configurations of the knobs, and the facts about a workload that decide which of them may be tried."""

from __future__ import annotations

import torch

from autobatch.core.knobs import Configuration, TuningContext, Value
from autobatch.device.host import usable_cores
from autobatch.rehearsal.setup import Setup
from autobatch.step.optimizers import stand_in_optimizers
from autobatch.workload.nested import tensors_of
from autobatch.workload.rng import preserved_random_state

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimizers with a fused step on GPUs and on the CPU."""


def changes(values: Configuration, default: Configuration) -> dict[str, Value]:
    """Return the values that differ from the default."""
    return {name: value for name, value in values.items() if value != default.get(name)}


def look_at_workload(
    setup: Setup, micro_batch: int, planned_steps: int, workers: int | None
) -> TuningContext:
    """Return the facts that decide which knobs apply; ``workers`` is None if no number was asked for."""
    device = setup.device
    cores = usable_cores()
    loader = None if workers is None else "the number of workers is given"
    others = device.native_precisions() if setup.precision == "fp32" else ()
    return TuningContext(
        precisions=(setup.precision, *(name for name in others if name != setup.precision)),
        optimizers=_implementations(setup),
        images=any(p.dim() == 4 for p in setup.model.parameters())
        and any(t.dim() == 4 for t in tensors_of(setup.worst_case.batch(2))),
        compiler=device.compiler_missing,
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
    """Return the seconds that fetching and collating the most expensive micro-batch takes, once warm."""
    with preserved_random_state():
        setup.worst_case.batch(size)
        start = setup.clock()
        setup.worst_case.batch(size)
        return setup.clock() - start
