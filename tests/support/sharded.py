"""Sharded steps, run by real ranks over gloo and traced on fake tensors as one rank of many."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from autobatch import Workload
from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.device.allocator.trace import Trace, replay
from autobatch.device.allocator.tracker import StorageTracker
from autobatch.distributed.sharding.build import fake_ranks
from autobatch.distributed.sharding.model import Sharding
from autobatch.estimates.traced_step import TracedStep, record
from autobatch.step.train_state import StepSettings, build_train_state
from autobatch.step.train_step import train_step
from autobatch.workload.data import WorstCaseSampler
from autobatch.workload.nested import feed
from tests.support.ranked import open_group

CPU = torch.device("cpu")


class Case(NamedTuple):
    """A way to run the steps of a workload over ranks."""

    micro_batch: int
    precision: Any = "fp32"
    steps: Sequence[int] = (1, 2, 2)


def run_real(workload: Workload, case: Case) -> Trace:
    """Run the steps in this rank of a real group, and return what it allocated."""
    torch.set_num_threads(1)
    group = open_group()
    sharding = Sharding(init_device_mesh("cpu", (group.world,)))
    torch.manual_seed(0)
    model = workload.model().train()
    worst_case = WorstCaseSampler(workload)
    arranged = sharding(model, case.precision)
    _wait_for_gloo(arranged._root)
    meter = StorageTracker(CountingAllocator())
    with meter:
        meter.mark("setup")
        meter.count([*model.parameters(), *model.buffers()])
        train_state = state_of(workload, model, case.precision)
        arranged.attach(train_state)
        for count in case.steps:
            batches = ((worst_case.batch(case.micro_batch), case.micro_batch) for _ in range(count))
            placed = feed(batches, CPU, meter)
            train_step(train_state, placed, count * case.micro_batch, mark=meter.mark)
        trace = meter.trace()
    group.close()
    assert trace is not None
    return trace.canonical()


class _Patient:
    """A collective of FSDP that ends when gloo's own thread has let go of its buffers.

    A rank frees them when it no longer needs them, but the thread that sent them may still hold them then.
    """

    def __init__(self, collective: Any) -> None:
        self._collective = collective
        self.allocate = collective.allocate

    def __call__(self, *args: Any, **more: Any) -> Any:
        work = self._collective(*args, **more)
        time.sleep(0.003)
        return work


def _wait_for_gloo(root: torch.nn.Module) -> None:
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(_Patient(DefaultAllGather()))
            module.set_custom_reduce_scatter(_Patient(DefaultReduceScatter()))


def state_of(workload: Workload, model: torch.nn.Module, precision: Any = "fp32") -> Any:
    """Build the train state of a model on the CPU."""
    return build_train_state(
        workload, model, CPU, StepSettings(precision=precision), learning_rate=workload.learning_rate
    )


def predict(workload: Workload, case: Case, world: int) -> Trace:
    """Trace the steps as rank 0 of so many; call this in a process of its own."""
    torch.set_num_threads(1)
    with fake_ranks(world) as sharding:
        setting = TracedStep(
            workload=workload,
            model=workload.model(),
            batch_of=WorstCaseSampler(workload).batch,
            precision=case.precision,
            capability=None,
            steps=case.steps,
            sharding=lambda: nullcontext(sharding),
        )
        return record(setting, case.micro_batch).trace


def peak_bytes(trace: Trace) -> int:
    """Return the most bytes that lived at a time."""
    return replay(trace, CountingAllocator()).peak_allocated_bytes
