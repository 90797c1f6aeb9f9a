"""`autobatch.batches` over ranks, against one pass over each whole batch in float64."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import autobatch
from autobatch.workload.order import GlobalBatchSampler
from tests.support.custom_loops import ids_by_batch, small_plan, train_in_own_loop
from tests.support.rank_server import RankServer
from tests.support.steps import EXACT, KINDS, SAMPLES
from tests.support.training import apart, make_workload, reference

pytestmark = pytest.mark.distributed


def own_loop(kind: str, target: int, limits: list[int], is_joined: bool) -> tuple[Tensor, list[float]]:
    """Train as a user does under torchrun, with a loss scale; return the weights and the losses."""
    torch.set_num_threads(1)
    if is_joined:
        torch.distributed.init_process_group("gloo")
    plan = small_plan(target, limits[int(os.environ["RANK"])], world_size=len(limits))
    options = {"epochs": 2, "seed": 3, "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**10)}
    found = train_in_own_loop(make_workload(**KINDS[kind][0]), plan, clip=0.01, **options)
    torch.distributed.destroy_process_group()
    return found


@pytest.mark.parametrize(
    ("kind", "target", "limits", "is_joined"),
    [
        ("mean", 10, [4, 2], False),
        ("terms", 23, [4, 5, 6], False),  # the last batch has 2 samples
        ("tokens", 10, [1, 20, 3], True),
        ("terms", 10, [1, 20, 3], False),
    ],
    ids=str,
)
def test_steps_equal_those_of_whole_batches(
    server: RankServer, kind: str, target: int, limits: list[int], is_joined: bool
) -> None:
    fields, whole_loss = KINDS[kind]
    workload = make_workload(**fields)
    sampler = GlobalBatchSampler(samples=SAMPLES, target_batch=target, seed=3, epochs=2)
    batches = [list(batch.ids) for batch in sampler.batches()]
    expected, losses = reference(workload, batches, whole_loss, clip=0.01)
    for weights, own in server.values(own_loop, kind, target, limits, is_joined, world=len(limits)):
        assert apart(weights, expected) <= EXACT
        assert own == pytest.approx(losses, rel=EXACT)


def streamed() -> tuple[list[list[int]], int]:
    """Return the samples of this rank in each batch of a stream, and how many it read."""
    read = []

    def numbers() -> Iterator[Tensor]:
        for number in range(23):
            read.append(number)
            yield torch.tensor(number)

    found = ids_by_batch(numbers, small_plan(10, 3, world_size=2), steps=4, start=1)
    torch.distributed.destroy_process_group()
    return found, len(read)


def test_ranks_share_a_stream_that_one_of_them_reads(server: RankServer) -> None:
    (first, read), (second, unread) = server.values(streamed)
    batches = [first + second for first, second in zip(first, second, strict=True)]
    assert batches == [[*range(10, 20)], [20, 21, 22, *range(7)], [*range(7, 17)]]
    assert (read, unread) == (40, 0)


def unlike(what: str) -> str:
    """Return the message about ranks that differ."""
    rank = int(os.environ["RANK"])
    numbered = [(torch.ones(1), index) for index in range(40)]
    turned = slice(None, None, 1 - 2 * rank)
    torch.manual_seed(rank if what == "weights" else 0)
    workload = make_workload(
        train_data=numbered[turned] if what == "training data" else numbered,
        sampler=[*range(40)][turned] if what == "sampler" else None,
    )
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    try:
        autobatch.batches(
            workload, small_plan(4, 4, world_size=2), optimizer=optimizer, seed=rank * (what == "seed")
        )
    except autobatch.InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", ["weights", "seed", "training data", "sampler"])
def test_ranks_that_differ_are_refused_on_all_of_them(server: RankServer, what: str) -> None:
    assert all(what in message for message in server.values(unlike, what))
