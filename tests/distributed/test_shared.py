"""Steps of ranks that share a model: exact for unlike ranks, and gone together if memory runs out on one."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autobatch import AutobatchError
from autobatch.training.loop import Loop
from autobatch.training.validation import Validator
from tests.support.detection import Detector, detection, scenes
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group
from tests.support.sharded_loops import sharded_loop
from tests.support.training import TOKENS, apart, averages, make_loop, make_workload, points

pytestmark = pytest.mark.distributed


def means(head: type[nn.Module] = nn.Identity) -> Any:
    """Make a workload whose loss is a mean, with blocks and an uneven number of rows."""

    def model() -> nn.Module:
        torch.manual_seed(1)
        blocks = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2)]
        return nn.Sequential(nn.Sequential(*blocks), head(), nn.Linear(5, 3)).double()

    return make_workload(model=model, train_data=points(24), validation_data=points(3))


class Deep(Detector):
    """A detector with blocks."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
        self.trunk = nn.Sequential(nn.Linear(5, 8), nn.Sequential(*blocks))
        # Too large to be copied for every batch.
        self.register_buffer("mask", torch.ones(2**18 + 1))


KINDS = {
    "means": means,
    "tokens": lambda: make_workload(**TOKENS),
    "terms": lambda: detection(model=lambda: Deep().double(), train_data=scenes(24)),
}
OPTIONS: dict[str, Any] = {"target_batch": 14, "steps": 3, "max_grad_norm": 0.3, "ema": 0.5}


def whole(tensors: Any) -> torch.Tensor:
    found = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    return torch.cat([one.detach().double().flatten() for one in found])


def run(loop: Loop) -> tuple[torch.Tensor, torch.Tensor, list[list[float | None]]]:
    """Train, and return the weights, their averages, and the figures of each step."""
    figures = [[one.loss, one.grad_norm, one.count] for one in loop.run()]
    state = loop.train_state
    return whole(state.model.parameters()), whole(averages(state.average)), figures


def train(kind: str, limits: list[int], options: dict[str, Any]) -> Any:
    group = open_group()
    loop = sharded_loop(group, KINDS[kind](), limits, **options)
    found = run(loop)
    Validator(loop).run()
    assert all(isinstance(p, DTensor) for p in loop.train_state.model.parameters()), "in parts again"
    group.close()
    return found


@pytest.mark.parametrize(
    ("kind", "limits", "changes"),
    [
        ("means", [5, 3], {"knobs": {"checkpointing": "full", "optimizer": "for-loop"}}),
        # One rank has a micro-batch more than the other.
        ("tokens", [5, 3], {"target_batch": 13}),
        ("terms", [5, 3], {"target_batch": 13}),
        pytest.param("means", [1, 1, 1], {"target_batch": 2}, id="a rank without samples"),
        *(pytest.param(kind, [7, 2, 4, 1], {}, marks=pytest.mark.slow) for kind in KINDS),
    ],
)
def test_steps_are_those_of_whole_batches(
    server: RankServer, kind: str, limits: list[int], changes: dict[str, Any]
) -> None:
    options = {**OPTIONS, **changes}
    expected = run(make_loop(KINDS[kind](), micro_batch=14, **{**options, "knobs": {}}))
    for weights, averaged, figures in server.values(train, kind, limits, options, world=len(limits)):
        assert apart(weights, expected[0]) < 1e-12
        assert apart(averaged, expected[1]) < 1e-12
        for of_step, other in zip(figures, expected[2], strict=True):
            assert of_step == pytest.approx(other, rel=1e-12)


class Noisy(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d(5), nn.Dropout(0.5))


def draws_and_buffers(limits: list[int]) -> tuple[int, list[float]]:
    """Return the updates of running statistics and the next draw of a rank."""
    group = open_group()
    loop = sharded_loop(group, means(Noisy), limits, target_batch=7, steps=1)
    torch.manual_seed(7)
    list(loop.run())
    buffers = dict(loop.train_state.model.named_buffers())
    found = int(buffers["1.0.num_batches_tracked"]), torch.rand(1).tolist()
    group.close()
    return found


def test_company_changes_neither_buffers_nor_draws(server: RankServer) -> None:
    # Two micro-batches of 2 on the first rank, and one of 3 on the other.
    (slow, _), (fast, drawn) = server.values(draws_and_buffers, [3, 3])
    assert (slow, fast) == (2, 1)
    torch.manual_seed(7)
    # The dropout of the one micro-batch draws, and nothing else does.
    nn.Dropout(0.5)(torch.ones(3, 5, dtype=torch.float64))
    assert drawn == torch.rand(1).tolist()


def run_out(kind: str, limits: list[int]) -> None:
    """Run out of memory on rank 1, in the first pass of the second step."""
    group = open_group()
    loop = sharded_loop(group, KINDS[kind](), limits, target_batch=14, steps=3)
    loss = loop.train_state.loss

    def failing(model: nn.Module, batch: Any) -> Any:
        if group.rank == 1 and loop.batches_seen == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return loss(model, batch)

    loop.train_state.loss = failing
    try:
        list(loop.run())
    except AutobatchError as error:
        # As the command line leaves.
        os._exit(group.fail(str(error), error.exit_code) or error.exit_code)


@pytest.mark.parametrize(("kind", "limit", "code"), [("means", 1, 3), ("terms", 3, 77)])
def test_out_of_memory_on_one_rank_ends_all_to_start_smaller_if_they_can(
    server: RankServer, kind: str, limit: int, code: int
) -> None:
    assert [one.code for one in server.run(run_out, kind, [limit, limit])] == [code, code]


def low_precision() -> float:
    """Return the sum of 256 gradients of 1 ÷ 256, in bf16."""
    group = open_group()
    workload = make_workload(
        model=lambda: nn.Linear(1, 4, bias=False).to(torch.bfloat16),
        train_data=points(256, dtype=torch.bfloat16),
        loss=lambda model, batch: model(batch[0][:, :1] * 0 + 1).sum() / 4,
        learning_rate=1.0,
    )
    loop = sharded_loop(group, workload, [1, 1], target_batch=256, steps=1)
    before = whole(loop.train_state.model.parameters())
    list(loop.run())
    moved = (before - whole(loop.train_state.model.parameters())).abs().mean()
    group.close()
    return float(moved)


def test_parameters_of_16_bits_are_summed_in_more(server: RankServer) -> None:
    assert server.values(low_precision)[0] == pytest.approx(0.25, rel=0.02)


def low_activations(precision: str) -> tuple[torch.Tensor, list[bool]]:
    """Train in 16 bits; return the weights and the steps that were applied."""
    group = open_group()
    workload = make_workload(model=lambda: means().model().float(), train_data=points(dtype=torch.float32))
    loop = sharded_loop(group, workload, [5, 3], target_batch=14, steps=4, precision=precision)
    if loop.train_state.scaler.is_enabled():
        loop.train_state.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    applied = [one.applied for one in loop.run()]
    weights = whole(loop.train_state.model.parameters())
    group.close()
    return weights, applied


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_steps_in_16_bits_are_near_those_in_32(server: RankServer, precision: str) -> None:
    expected, _ = server.values(low_activations, "fp32")[0]
    (weights, applied), other = server.values(low_activations, precision)
    assert torch.equal(weights, other[0])
    assert applied == [True] * 4
    assert apart(weights, expected) < 0.01
