"""`autobatch.batches` over ranks, against one pass over each whole batch in float64."""

from __future__ import annotations

import os
import warnings
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import autobatch
from autobatch import Plan
from autobatch.workload.order import GlobalBatchSampler
from tests.support.custom_loops import (
    EXACT,
    KINDS,
    SAMPLES,
    gan_data,
    small_plan,
    train_gan,
    train_gan_on_whole_batches,
    train_in_own_loop,
)
from tests.support.rank_server import RankServer
from tests.support.training import apart, reference

pytestmark = pytest.mark.distributed


def plan_of(rank: int, target: int, limits: list[int]) -> Plan:
    return small_plan(max(target, len(limits)), limits[rank], world_size=len(limits))


def own_loop(kind: str, limits: list[int], form: str, is_joined: bool) -> tuple[Tensor, list[float], int]:
    """Train as a user does under torchrun; return the weights, the losses and the samples of this rank."""
    torch.set_num_threads(1)
    if is_joined:
        torch.distributed.init_process_group("gloo")
    workload, _ = KINDS[kind]
    plan = plan_of(int(os.environ["RANK"]), 10, limits)
    data = DataLoader(workload.train_data, batch_size=7) if form == "loader" else workload.train_data
    batches = autobatch.batches(data, plan, epochs=2, seed=3, counts=workload.counts)
    weights, losses = train_in_own_loop(workload, batches, clip=0.01)
    torch.distributed.destroy_process_group()
    return weights, losses, len(losses)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("limits", "form", "is_joined"),
    [([4, 2], "data", False), ([1, 20, 3], "data", True), ([2, 9], "loader", False)],
    ids=str,
)
def test_steps_equal_those_of_whole_batches(
    server: RankServer, kind: str, limits: list[int], form: str, is_joined: bool
) -> None:
    workload, whole_loss = KINDS[kind]
    order = list(range(SAMPLES)) * 2
    batches = [order[at : at + 10] for at in range(0, 48, 10)]
    if form == "data":
        sampler = GlobalBatchSampler(samples=SAMPLES, target_batch=10, seed=3, epochs=2)
        batches = [list(one.ids) for one in sampler.batches()]
    expected, losses = reference(workload, batches, whole_loss, clip=0.01)
    for weights, own, steps in server.values(own_loop, kind, limits, form, is_joined, world=len(limits)):
        assert steps == 5
        assert apart(weights, expected) <= EXACT
        assert own == pytest.approx(losses, rel=EXACT)


def gan_over_ranks(limits: list[int]) -> Tensor:
    """Train a GAN in two passes; the last batch has fewer samples than ranks."""
    torch.set_num_threads(1)
    plan = msgspec.structs.replace(plan_of(int(os.environ["RANK"]), 11, limits), last_batch="flush")
    found = train_gan(
        lambda both: autobatch.batches(
            gan_data(), plan, sampler=[*range(SAMPLES - 1)], epochs=2, optimizer=both
        ),
        clip=0.01,
    )
    torch.distributed.destroy_process_group()
    return found


@pytest.mark.parametrize("limits", [[3, 2], [1, 20, 3]], ids=str)
def test_two_passes_are_the_two_steps_of_a_gan(server: RankServer, limits: list[int]) -> None:
    whole = [[*range(11)], [*range(11, 22)], [22]] * 2
    expected = train_gan_on_whole_batches(whole, clip=0.01)
    for found in server.values(gan_over_ranks, limits, world=len(limits)):
        assert apart(found, expected) <= EXACT


def ranks_without_samples(precision: str) -> list[tuple[float, bool]]:
    """Train batches of 4 samples on 3 ranks, the last of 1 sample; return the loss and whether it stepped."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu") if precision == "fp16" else None
    data = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    plan = small_plan(4, 4, world_size=3, last_batch="flush")
    found = []
    for batch in autobatch.batches(data, plan, sampler=range(4, -1, -1), scaler=scaler, optimizer=optimizer):
        for micro in batch:
            batch.backward(model(micro.data).square().mean())
        result = batch.step()
        found.append((result.loss, result.applied))
    torch.distributed.destroy_process_group()
    return found


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_rank_may_have_no_sample(server: RankServer, precision: str) -> None:
    first, *others = server.values(ranks_without_samples, precision, world=3)
    assert [applied for _, applied in first] == [True, True]
    assert others == [first, first]


NUMBERED = [(torch.ones(1), index) for index in range(40)]
"""Samples whose labels tell them apart."""


def data_of(what: str, rank: int) -> Any:
    """Return the data of a rank, which differ between ranks."""
    return {
        "seed": NUMBERED,
        "length": NUMBERED[: 20 + 9 * rank],
        "order": NUMBERED[:: 1 - 2 * rank],
        "loader": DataLoader(NUMBERED[: 20 + 9 * rank], batch_size=2),
        "sampler": DataLoader(NUMBERED, sampler=DistributedSampler(NUMBERED, 2, rank)),
        "stream that is split": iter(NUMBERED[rank::2]),
        "stream that ends": iter(NUMBERED[: 20 + 9 * rank]),
        "values": iter([(torch.randn(1), 0) for _ in range(8)]),
    }.get(what, NUMBERED)


def unlike(what: str) -> str:
    """Return the message about ranks that differ."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank if what in ("weights", "values") else 0)
    data = data_of(what, rank)
    if what == "values":
        torch.manual_seed(0)
    model = nn.Linear(1, 1)
    plan = small_plan(4, 4, world_size=3 if what == "world" else 2)
    try:
        with warnings.catch_warnings(action="error"):
            for batch in autobatch.batches(data, plan, seed=rank if what == "seed" else 0):
                for micro in batch:
                    batch.backward(model(micro.data[0]).mean())
                batch.step(torch.optim.SGD(model.parameters(), lr=0.1))
    except (autobatch.InputError, UserWarning) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("weights", "the weights of the ranks differ before the first step"),
        ("seed", "the ranks differ in seed: rank 1 has 1, and rank 0 has 0"),
        ("world", "the plan is for 3 ranks, and autobatch.batches runs in 2 processes"),
        ("length", "the ranks differ in number of batches: rank 1 has 8, and rank 0 has 5"),
        ("order", "the training data of rank 1 are not those of rank 0, in values or in order"),
        ("loader", "the ranks differ in length of the data: rank 1 has 15, and rank 0 has 10"),
        ("sampler", "a DistributedSampler draws a part of the data for each rank: leave it out"),
        ("stream that is split", "the first batch of rank 1 is not that of rank 0"),
        ("stream that ends", "the data of rank 0 ended before those of other ranks"),
        ("values", "If the values are random by nature, all is well"),
    ],
)
def test_ranks_that_differ_are_refused_on_all_of_them(server: RankServer, what: str, message: str) -> None:
    found: list[Any] = server.values(unlike, what)
    assert all(message in one for one in found)
