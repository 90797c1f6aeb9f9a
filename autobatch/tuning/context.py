"""Facts about a device and a workload that decide which knobs apply."""

from __future__ import annotations

import torch

from autobatch.core.knobs import TuningContext
from autobatch.device.base import Device
from autobatch.device.host import usable_cores
from autobatch.setup.setup import Setup, stand_in_optimizers
from autobatch.step.apply_knobs import find_blocks
from autobatch.tuning.timing import fetch_share
from autobatch.workload.contract import Workload
from autobatch.workload.feed import SeededCollate
from autobatch.workload.loader import why_not_sent
from autobatch.workload.nested import tensors_of

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimizers with a fused step on GPUs and on the CPU."""


def describe_context(
    setup: Setup,
    *,
    precision_is_open: bool,
    micro_batch: int,
    planned_steps: int,
    workers_are_open: bool = True,
) -> TuningContext:
    """Return the facts that decide which knobs apply.

    Args:
        setup: the device and the workload.
        precision_is_open: True if the user chose no precision.
        micro_batch: the largest that the plan may use, in samples.
        planned_steps: optimizer steps of the run to tune for.
        workers_are_open: True if the user chose no number of loader workers.
    """
    cores = usable_cores()
    loader = why_not_workers(setup) if workers_are_open else "the number of workers is given"
    precisions = setup.device.native_precisions() if precision_is_open else ()
    others = [one for one in precisions if one != setup.precision]
    return TuningContext(
        precisions=(setup.precision, *others),
        optimizers=implementations(setup.workload, setup.device),
        blocks=len(find_blocks(setup.model)),
        images=any(p.dim() == 4 for p in setup.model.parameters())
        and any(t.dim() == 4 for t in tensors_of(setup.worst_case.batch(2))),
        compiler=setup.device.compiler_missing(),
        micro_batch=micro_batch,
        planned_steps=planned_steps,
        cores=cores,
        loader=loader,
        fetch_share=fetch_share(setup, micro_batch) if loader is None and cores > 1 else 0.0,
        gains_from_compile=setup.device.gains_from_compile,
        reads_pinned_memory=setup.device.reads_pinned_memory,
        segments=setup.device.why_not_expandable(),
    )


def why_not_workers(setup: Setup) -> str | None:
    """Return why loader workers cannot feed the workload, or None if they can."""
    workload = setup.workload
    collate = SeededCollate(data=workload.train_data, collate=workload.collate, seed=0)
    return why_not_sent(collate, setup.worst_case.batch(1))


def implementations(workload: Workload, device: Device) -> tuple[str, ...]:
    """Return the implementations of the workload's optimizer that are left to choose, ``default`` first."""
    made = stand_in_optimizers(workload)
    if not made or any(
        one.defaults.get("fused") is not None or one.defaults.get("foreach", True) is not None for one in made
    ):
        return ("default",)
    is_fusible = all(type(one) in FUSED for one in made)
    return tuple(one for one in device.optimizer_implementations() if one != "fused" or is_fusible)
