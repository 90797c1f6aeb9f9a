"""Memory of the steps of a shared model: one process predicts, and measures alone, that of a real rank."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from autobatch import InputError
from autobatch.device.allocator import Allocator
from autobatch.device.trace import Trace, replay
from autobatch.device.tracker import StorageTracker
from autobatch.distributed.shard import fake_ranks, shard, sharding_alone
from autobatch.estimates.traced_step import TracedStep, record
from autobatch.rehearsal.rehearsal import on_copies
from autobatch.step.train_state import StepSettings, TrainState, build_train_state
from autobatch.step.train_step import train_step
from autobatch.workload.data import WorstCaseSampler
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group
from tests.support.step_workloads import WORKLOADS
from tests.support.training import make_setup

pytestmark = pytest.mark.distributed
MICRO_BATCH, STEPS = 3, (1, 2)
CPU = torch.device("cpu")


class Patient:
    """A collective of FSDP that ends when gloo's own thread has let go of its buffers.

    A rank frees them when it no longer needs them, but the thread that sent them may still hold them then.
    """

    def __init__(self, collective: Any) -> None:
        self._collective, self.allocate = collective, collective.allocate

    def __call__(self, *args: Any, **more: Any) -> Any:
        work = self._collective(*args, **more)
        time.sleep(0.003)
        return work


def take_steps(train_state: TrainState, steps: tuple[int, ...], batch_of: Any) -> float:
    for count in steps:
        batches = ((batch_of(MICRO_BATCH), MICRO_BATCH) for _ in range(count))
        result = train_step(train_state, train_state.feed(batches), count * MICRO_BATCH)
    return result.loss


def peak_of(trace: Trace) -> tuple[int, int]:
    """Return the most bytes that lived at a time, and the number of events."""
    return replay(trace, Allocator()).peak_allocated_bytes, len(trace.events)


def real(precision: Any) -> tuple[int, int]:
    """Run the steps in this rank of a real group."""
    torch.set_num_threads(1)
    group, workload = open_group(), WORKLOADS["transformer"]()
    model = workload.model().train()
    batch_of = WorstCaseSampler(workload).batch
    sharded = shard(init_device_mesh("cpu", (group.world,)), model, precision)
    for part in sharded.parts():
        part.set_custom_all_gather(Patient(DefaultAllGather()))
        part.set_custom_reduce_scatter(Patient(DefaultReduceScatter()))
    meter = StorageTracker(Allocator())
    with meter:
        meter.mark("setup")
        train_state = build_train_state(workload, model, CPU, StepSettings(precision=precision), meter)
        sharded.attach(train_state)
        take_steps(train_state, STEPS, batch_of)
        found = peak_of(meter.trace())
    with pytest.raises(InputError, match="this process has a process group already"), fake_ranks(64):
        pass
    group.close()
    return found


def predicted(precision: Any) -> tuple[int, int]:
    """Trace the steps as rank 0 of two."""
    torch.set_num_threads(1)
    workload = WORKLOADS["transformer"]()
    with fake_ranks(2) as sharding:
        made = make_setup(workload, precision=precision)
        step = TracedStep(setup=made, capability=None, steps=STEPS, sharding=lambda: nullcontext(sharding))
        found = peak_of(record(step, MICRO_BATCH).trace)
    assert not dist.is_initialized(), "it leaves no group"
    return found


def alone(precision: Any) -> tuple[list[int], float]:
    """Run the steps of a rank without the others, then more; return their peaks, and the last loss."""
    torch.set_num_threads(1)
    setup = make_setup(WORKLOADS["transformer"]())
    setup = replace(setup, precision=precision, sharding=sharding_alone(2, "cpu"))
    peaks = []
    for steps in (STEPS, (1, 5)):
        meter = StorageTracker(Allocator())
        with meter, on_copies(setup, meter) as train_state:
            loss = take_steps(train_state, steps, setup.worst_case.batch)
        peaks.append(peak_of(meter.trace())[0])
    return peaks, loss


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_one_process_predicts_and_measures_the_bytes_of_real_ranks(
    server: RankServer, precision: str
) -> None:
    peak, events = server.values(real, precision)[0]
    ((foretold, its_events),) = server.values(predicted, precision, world=1)
    assert foretold == peak
    # On torch 2.11, operators over lists of fake tensors make temporary tensors that real ones do not.
    assert torch.__version__.startswith("2.11.") or its_events == events
    (((measured, longer), loss),) = server.values(alone, precision, world=1)
    assert math.isfinite(loss)
    assert abs(measured - peak) <= 4096
    assert longer == measured, "more micro-batches than a probe runs take no more memory"
