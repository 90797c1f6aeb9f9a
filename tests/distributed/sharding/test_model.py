"""Sharded steps: exact gradients, memory that one process predicts to the byte, models that are refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor import DTensor

from autobatch import InputError, Workload
from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.device.allocator.trace import replay
from autobatch.device.allocator.tracker import StorageTracker
from autobatch.distributed.sharding import model as sharding_model
from autobatch.distributed.sharding.build import fake_ranks, sharding_alone
from autobatch.distributed.sharding.model import Sharding
from autobatch.rehearsal.attempt import attempt
from autobatch.rehearsal.rehearsal import on_copies
from autobatch.step.train_step import train_step
from benchmarks.workloads import WORKLOADS as BENCHMARKED
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group
from tests.support.sharded import Case, peak_bytes, predict, run_real, state_of
from tests.support.step_workloads import WORKLOADS
from tests.support.training import Rows, make_setup

pytestmark = pytest.mark.distributed
MADE = {**WORKLOADS, **BENCHMARKED}


def real(name: str, case: Case):
    return run_real(MADE[name](), case)


def predicted(name: str, case: Case, world: int):
    return predict(MADE[name](), case, world)


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_one_process_predicts_the_bytes_of_real_ranks(server: RankServer, precision):
    case = Case(3, precision, steps=(1, 2))
    ran = server.values(real, "transformer", case, world=2)[0]
    (traced,) = server.values(predicted, "transformer", case, 2, world=1)
    assert peak_bytes(traced) == peak_bytes(ran)
    # On torch 2.11, operators over lists of fake tensors make temporary tensors that real ones do not.
    if not torch.__version__.startswith("2.11."):
        assert len(traced.events) == len(ran.events)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", BENCHMARKED)
def test_more_workloads_and_ranks(server: RankServer, name, precision, world):
    case = Case(3, precision)
    ran = server.values(real, name, case, world=world)[0]
    (traced,) = server.values(predicted, name, case, world, world=1)
    assert peak_bytes(traced) == peak_bytes(ran)


def linear_workload() -> Workload:
    torch.manual_seed(0)
    data = Rows(torch.randn(24, 6, dtype=torch.float64), torch.randn(24, 3, dtype=torch.float64))

    def model():
        torch.manual_seed(1)
        blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)]
        return nn.Sequential(nn.Sequential(*blocks), nn.Linear(6, 3)).double()

    return Workload(
        model=model,
        train_data=data,
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        optimizer=lambda params, lr: torch.optim.SGD(params, lr=lr),
        learning_rate=0.5,
    )


class Counted(DefaultAllGather):
    """An all-gather that counts its calls."""

    calls = 0

    def __call__(self, *args, **more):
        self.calls += 1
        return super().__call__(*args, **more)


def gather_roots(*kept_bytes: int) -> list[tuple[list[int], list[list[float]]]]:
    """Train a model for each size of roots that are kept; return the gathers of the root, and the weights."""
    open_group()
    found = []
    for sharding_model.KEPT_BYTES in kept_bytes:
        found.append(gather_root())
    return found


def gather_root() -> tuple[list[int], list[list[float]]]:
    """Take steps of three micro-batches and of one."""
    workload = linear_workload()
    model = workload.model()
    arranged = Sharding(init_device_mesh("cpu", (2,)))(model, "fp32")
    train_state = state_of(workload, model)
    arranged.attach(train_state)
    *_, root = sorted(arranged.parts(), key=lambda one: len(list(one.modules())))
    counted = Counted()
    root.set_custom_all_gather(counted)
    calls = []
    batch = torch.utils.data.default_collate([workload.train_data[index] for index in range(4)])
    for count in (3, 1):
        counted.calls = 0
        train_step(train_state, arranged.begin_step([(batch, 4)] * count, count), 8 * count)
        assert all(isinstance(one, DTensor) for one in model.parameters())
        calls.append(counted.calls)
    return calls, [one.full_tensor().tolist() for one in model.parameters()]


def test_a_small_root_is_gathered_once_per_step(server: RankServer):
    size = 8 * (6 * 3 + 3)
    (often, weights), (once, same) = server.values(gather_roots, size - 1, size)[0]
    assert often == [3, 1]
    assert once == [1, 1]
    assert same == weights


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
            result = train_step(
                train_state, train_state.begin_step(batches, count), count * case.micro_batch, mark=meter.mark
            )
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


def attempted(budget: str) -> tuple[bool, int | None, str | None]:
    torch.set_num_threads(1)
    setup = replace(make_setup(WORKLOADS["perceptron"](), budget), sharding=sharding_alone(2, "cpu"))
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
