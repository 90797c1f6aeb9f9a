"""Sharded steps: exact gradients, memory that one process predicts to the byte, models that are refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from autobatch import InputError
from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.device.allocator.trace import replay
from autobatch.device.allocator.tracker import StorageTracker
from autobatch.distributed.sharding.build import fake_ranks, sharding_alone
from autobatch.rehearsal.rehearsal import on_copies
from autobatch.step.train_step import train_step
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group
from tests.support.sharded import Case, peak_bytes, predict, run_real
from tests.support.step_workloads import WORKLOADS
from tests.support.training import make_setup

pytestmark = pytest.mark.distributed


def real(name: str, case: Case):
    return run_real(WORKLOADS[name](), case)


def predicted(name: str, case: Case, world: int):
    return predict(WORKLOADS[name](), case, world)


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_one_process_predicts_the_bytes_of_real_ranks(server: RankServer, precision):
    case = Case(3, precision, steps=(1, 2))
    ran = server.values(real, "transformer", case, world=2)[0]
    (traced,) = server.values(predicted, "transformer", case, 2, world=1)
    assert peak_bytes(traced) == peak_bytes(ran)
    # On torch 2.11, operators over lists of fake tensors make temporary tensors that real ones do not.
    if not torch.__version__.startswith("2.11."):
        assert len(traced.events) == len(ran.events)


def alone(name: str, case: Case, world: int) -> tuple[int, float]:
    """Return the peak of the steps of a rank without the others, and the loss of the last."""
    torch.set_num_threads(1)
    setup = replace(
        make_setup(WORKLOADS[name]()), precision=case.precision, sharding=sharding_alone(world, "cpu")
    )
    meter = StorageTracker(CountingAllocator())
    with meter, on_copies(setup, meter) as train_state:
        for count in case.steps:
            batches = ((setup.worst_case.batch(case.micro_batch), case.micro_batch) for _ in range(count))
            result = train_step(train_state, batches, count * case.micro_batch, mark=meter.mark)
    trace = meter.trace()
    assert trace is not None
    return replay(trace.canonical(), CountingAllocator()).peak_allocated_bytes, result.loss


def test_a_rank_without_the_others_takes_the_memory_of_a_real_one(server: RankServer) -> None:
    case = Case(3)
    expected = peak_bytes(server.values(real, "transformer", case)[0])
    ((peak, loss),) = server.values(alone, "transformer", case, 2, world=1)
    assert math.isfinite(loss)
    # Here each batch is counted as the loader makes it.
    assert abs(peak - expected) <= 4096
    ((longer, _),) = server.values(alone, "transformer", Case(3, steps=(1, 2, 5)), 2, world=1)
    assert longer == peak, "more micro-batches than a probe runs take no more memory"


def reduce_alone() -> tuple[int, int, float, bool]:
    with fake_ranks(64) as mesh:
        one = torch.ones(3)
        dist.all_reduce(one)
        place = (dist.get_rank(), mesh.size(), float(one[0]))
    return (*place, dist.is_initialized())


def test_a_rank_of_many_waits_for_nobody_and_leaves_no_group(server: RankServer):
    assert server.values(reduce_alone, world=1) == [(0, 64, 1.0, False)]


def open_within_a_group() -> str:
    group = open_group()
    try:
        with fake_ranks(8):
            pass
    except InputError as error:
        group.close()
        return str(error)
    return ""


def test_a_process_with_a_group_is_refused(server: RankServer):
    assert "this process has a process group already" in server.values(open_within_a_group, world=2)[0]
