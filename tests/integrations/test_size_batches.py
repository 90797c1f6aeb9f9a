"""Batches cut by size in a loop of one's own, against training on whole batches."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch.utils.data import DataLoader

import autobatch
from autobatch.core.errors import InputError
from autobatch.planning import make_plan
from tests.support.ragged import pad, ragged_split, ragged_workload, sequence_loss
from tests.support.training import apart, make_loop, weights

WORKLOAD = ragged_workload()
CUT = ragged_split(WORKLOAD, 4).cut
PLAN = msgspec.structs.replace(
    make_plan(target_batch=24, micro_batch_limit=4, learning_rate=0.01),
    split="size",
    size_cut=msgspec.structs.replace(CUT, by_size_of=True),
)


def length(sample) -> int:
    return len(sample[0])


def train(data, **options):
    """Train in a loop of one's own; return the weights and the samples of each micro-batch."""
    torch.manual_seed(0)
    model = WORKLOAD.model()
    optimizer = WORKLOAD.optimizer(model.parameters(), 0.01)
    counts = []
    for batch in autobatch.batches(data, PLAN, steps=4, **options):
        counts.append([])
        for micro in batch:
            batch.backward(sequence_loss(model, micro.data))
            counts[-1].append((micro.samples, micro.data[0].shape[1]))
        batch.step(optimizer)
    return weights(model), counts


def whole() -> torch.Tensor:
    loop = make_loop(WORKLOAD, target_batch=24, micro_batch=24, steps=4)
    list(loop.run())
    return weights(loop.train_state.model)


def test_batches_are_cut_by_size_and_keep_their_gradient() -> None:
    found, counts = train(WORKLOAD.train_data, collate=pad, size_of=length)
    assert apart(found, whole()) <= 1e-12
    for batch in counts:
        assert sum(samples for samples, _ in batch) == 24
        assert [padded for _, padded in batch] == sorted((padded for _, padded in batch), reverse=True)
        for samples, padded in batch:
            knot = next(number for number, size in enumerate(CUT.sizes) if size >= padded)
            assert samples <= CUT.micro_batches[knot]


def test_a_stream_is_cut_too() -> None:
    data = WORKLOAD.train_data
    _, counts = train((data[i % len(data)] for i in range(96)), collate=pad, size_of=length)
    assert all(batch[0][1] > batch[-1][1] for batch in counts)


@pytest.mark.parametrize("is_loader", [False, True])
def test_without_sizes_batches_are_split_by_count(is_loader: bool) -> None:
    if is_loader:
        data = DataLoader(WORKLOAD.train_data, batch_size=8, collate_fn=pad)
        _, counts = train(data, size_of=length)
    else:
        found, counts = train(WORKLOAD.train_data, collate=pad)
        assert apart(found, whole()) <= 1e-12
    assert all(sum(samples for samples, _ in batch) == 24 for batch in counts)
    assert max(samples for batch in counts for samples, _ in batch) <= 4


def test_an_invalid_size_is_an_error() -> None:
    with pytest.raises(InputError, match="returned nan for sample 0"):
        train(WORKLOAD.train_data, collate=pad, size_of=lambda sample: float("nan"))
