"""Footprints of a workload for an estimate, each traced once.

Allocations differ between GPUs that run other kernels or another precision, between ways to share a step
among ranks, and with each change that may help. Everything else, for example the budget, is a replay.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from autobatch.core.errors import InputError
from autobatch.core.options import Options
from autobatch.core.records import Parallel
from autobatch.core.units import format_bytes
from autobatch.device.oom import memory_named
from autobatch.device.profiles import HardwareProfile
from autobatch.estimates.attention import GENERATIONS, Capability
from autobatch.estimates.footprints import Footprint, footprint
from autobatch.estimates.gpus import Gpus
from autobatch.estimates.traced_step import TracedStep
from autobatch.rehearsal.setup import build_model, check_loss_of_ranks, whole_batch_notes
from autobatch.step.gradients import gradient_dtype_of, gradient_sum_notes
from autobatch.workload.contract import WholeBatchLoss, Workload
from autobatch.workload.data import WorstCaseSampler

if TYPE_CHECKING:  # importing FSDP takes a second
    from autobatch.distributed.sharding.model import Sharding


class Layout(NamedTuple):
    """The ranks of a step, and what each of them holds."""

    world: int = 1
    shards: int | None = None
    """Ranks that share the model; None if each has a whole one."""

    @property
    def parallel(self) -> Parallel:
        """The layout in a word."""
        return "replicate" if self.shards is None else "shard"

    @contextmanager
    def sharding(self) -> Iterator[Sharding | None]:
        """Act as a rank of this layout within the block: rank 0 of a group that exchanges nothing."""
        if self.shards is None:
            yield None
            return
        from autobatch.distributed.sharding.build import fake_ranks
        from autobatch.distributed.sharding.model import Sharding

        with fake_ranks(self.world) as mesh:
            yield Sharding(mesh)


class Traces:
    """Footprints of a workload, each traced once.

    Raises:
        InputError: the model or the data are invalid.
    """

    def __init__(self, workload: Workload, options: Options, gpus: Gpus) -> None:
        self.workload = workload
        self._options, self._gpus = options, gpus
        is_whole = isinstance(workload.loss, WholeBatchLoss)
        self.whole_batch = options.batch.target_batch if is_whole else None
        self.model, self._build_notes = on_meta(workload)
        self.gradient_dtype = gradient_dtype_of(self.model, options.device.gradient_dtype)
        self._worst_case = WorstCaseSampler(workload)
        self._worst_case.check_collate()
        self._batch_of = cache(self._worst_case.batch)
        self._known: dict[Layout, dict[Capability, Footprint]] = {}
        """By layout, and by the generation of the GPU."""

    def layout(self, parallel: Parallel, world: int) -> Layout:
        """Return the layout of ranks.

        Raises:
            InputError: they cannot sum the loss.
        """
        if parallel == "replicate":
            return Layout(world)
        check_loss_of_ranks(self.workload, world)
        # Here, or each copy would import it again.
        import autobatch.distributed.sharding.build  # noqa: F401

        return Layout(world, world)

    def footprint(self, gpu: HardwareProfile, layout: Layout) -> Footprint:
        """Return the footprint of a step on a GPU.

        Raises:
            AutobatchError: the step cannot be traced.
        """
        known = self._known.setdefault(layout, {})
        generation = max(GENERATIONS[0], *(first for first in GENERATIONS if first <= gpu.compute_capability))
        if not any(found.is_for_all for found in known.values()) and generation not in known:
            known[generation] = footprint(self.step(gpu, layout), self._options.search.micro_batch)
        return known.get(generation) or next(iter(known.values()))

    def step(self, gpu: HardwareProfile, layout: Layout) -> TracedStep:
        """Return what is traced for a GPU."""
        return TracedStep(
            workload=self.workload,
            model=self.model,
            batch_of=self._batch_of,
            precision=self._gpus.precision,
            gradient_dtype=self.gradient_dtype,
            capability=gpu.compute_capability,
            multiple=self._options.search.micro_batch_multiple,
            samples=self.whole_batch,
            sharding=layout.sharding,
            world=1 if layout.shards else layout.world,
        )

    def notes(self) -> Iterator[str]:
        """Yield remarks on the workload and its traces, one per line."""
        yield from self._worst_case.notes
        yield from self._build_notes
        yield from whole_batch_notes(self.workload, self.whole_batch)
        yield from gradient_sum_notes(self.model, self.gradient_dtype)
        for known in self._known.values():
            for found in known.values():
                yield from found.notes


def on_meta(workload: Workload) -> tuple[nn.Module, list[str]]:
    """Build the workload's model without memory for its parameters, or on the CPU with a note.

    Returns:
        The model, and a remark if its constructor needs values.

    Raises:
        InputError: ``Workload(model=…)`` returns no module.
        DoesNotFitError: its constructor needs values, for which the memory of this machine does not suffice.
    """
    try:
        with torch.device("meta"):
            return build_model(workload), []
    except InputError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
    with memory_named("the model was built"):
        model = build_model(workload)
    size = format_bytes(sum(p.numel() * p.element_size() for p in model.parameters()))
    return model, [
        f"the model cannot be built on the meta device ({reason}), so it was built on the CPU, where its "
        f"parameters take {size}: let its constructor read no values of tensors"
    ]
