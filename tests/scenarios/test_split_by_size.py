"""Batches that are split by size: the same gradient and the same draws."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn

from autobatch import Loss
from autobatch.training.validation import validate
from autobatch.workload.feed import Feed
from tests.support.ragged import CONTRASTIVE, Sequences, ragged_split, ragged_workload
from tests.support.training import apart, make_loop, token_loss, weights


def loop_of(workload, *, by_size: bool = True, limit: int = 5, **options):
    options = {"target_batch": 24, "steps": 6, **options}
    if not by_size:
        return make_loop(workload, micro_batch=limit, **options)
    split = ragged_split(workload, limit)
    return make_loop(workload, micro_batch=split.largest, split=split, **options)


@pytest.mark.parametrize("changes", [{}, {"loss": CONTRASTIVE}])
@pytest.mark.parametrize("limit", [1, 3, 24])
def test_the_weights_are_those_of_whole_batches(limit: int, changes) -> None:
    workload = ragged_workload(**changes)
    whole = loop_of(workload, by_size=False, limit=24)
    list(whole.run())
    split = loop_of(workload, limit=limit)
    records = list(split.run())
    assert apart(weights(split.train_state.model), weights(whole.train_state.model)) <= 1e-12
    assert all(record.accumulation_steps > 1 for record in records if limit < 24)


def test_random_draws_of_the_data_belong_to_the_sample_and_not_to_the_split() -> None:
    workload = ragged_workload(train_data=Sequences(noise=0.7))
    found = []
    for by_size, workers in ((False, 0), (True, 0), (True, 2)):
        loop = loop_of(workload, by_size=by_size)
        loop.feed = Feed(loop.workload, loop.sampler, loop.split, workers=workers, seeds_samples=True)
        with closing(loop.feed):
            list(loop.run())
        found.append(weights(loop.train_state.model))
    assert apart(found[0], found[1]) <= 1e-12
    assert torch.equal(found[1], found[2])


def test_a_validation_takes_no_more_of_the_longest_samples_than_fit() -> None:
    validated: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Loss:
        validated.append(len(batch[0]))
        return token_loss(model, batch)

    loop = loop_of(ragged_workload(loss=loss, validation_data=Sequences(33)))
    validate(loop)
    assert max(validated) == 5 < loop.micro_batch
