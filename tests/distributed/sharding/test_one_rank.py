"""The steps of one rank without the others take the memory of a real rank, and finite values."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.device.allocator.trace import replay
from autobatch.device.allocator.tracker import StorageMeter
from autobatch.distributed.sharding.layout import ShardLayout
from autobatch.setup.attempt import attempt
from autobatch.setup.rehearsal import on_copies
from autobatch.step.train_step import train_step
from tests.support.rank_server import RankServer
from tests.support.sharded import Case, peak_bytes, run_real
from tests.support.step_workloads import WORKLOADS
from tests.support.training import make_setup


def real(name: str, case: Case) -> int:
    return peak_bytes(run_real(WORKLOADS[name](), case))


def alone(name: str, case: Case, world: int) -> tuple[int, float]:
    """Return the peak of the steps of a rank without the others, and the loss of the last."""
    torch.set_num_threads(1)
    layout = ShardLayout(world=world, sync=case.sync)
    setup = replace(make_setup(WORKLOADS[name]()), precision=case.precision, sharding=layout.for_probe("cpu"))
    meter = StorageMeter(CountingAllocator())
    with meter, meter.noticing_resizes(), on_copies(setup, meter) as train_state:
        for count in case.steps:
            batches = ((setup.worst_case.batch(case.micro_batch), case.micro_batch) for _ in range(count))
            result = train_step(
                train_state, train_state.begin_step(batches, count), count * case.micro_batch, mark=meter.mark
            )
    trace = meter.trace()
    assert trace is not None
    return replay(trace.canonical(), CountingAllocator()).peak_allocated_bytes, result.loss


@pytest.mark.distributed
@pytest.mark.parametrize("sync", ["each", "once"])
def test_a_rank_without_the_others_takes_the_memory_of_a_real_one(server: RankServer, sync: str) -> None:
    case = Case(3, sync)  # type: ignore[arg-type]
    expected = server.values(real, "transformer", case)[0]
    ((peak, loss),) = server.values(alone, "transformer", case, 2, world=1)
    assert math.isfinite(loss)
    # Here each batch is counted as the loader makes it.
    assert abs(peak - expected) <= 4096


@pytest.mark.parametrize("sync", ["each", "once"])
def test_more_micro_batches_than_a_probe_runs_take_no_more_memory(server: RankServer, sync: str) -> None:
    ((probed, _),) = server.values(alone, "transformer", Case(3, sync, steps=(1, 2, 2)), 2, world=1)
    ((longer, _),) = server.values(alone, "transformer", Case(3, sync, steps=(1, 2, 5)), 2, world=1)
    assert longer == probed


def attempted(budget: str) -> tuple[bool, int | None, str | None]:
    torch.set_num_threads(1)
    layout = ShardLayout(world=2)
    setup = replace(make_setup(WORKLOADS["perceptron"](), budget), sharding=layout.for_probe("cpu"))
    outcome = attempt(setup, 2)
    return outcome.attempt.fits, outcome.attempt.peak_allocated_bytes, outcome.attempt.reason


def test_an_attempt_enforces_the_budget(server: RankServer) -> None:
    ((fits, peak, _),) = server.values(attempted, "1GiB", world=1)
    assert fits
    assert peak is not None
    ((fits, _, reason),) = server.values(attempted, f"{peak - 1}B", world=1)
    assert not fits
    assert reason is not None
    assert "out of memory" in reason
