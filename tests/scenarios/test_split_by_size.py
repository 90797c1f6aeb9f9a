"""Batches that are split by size: the same gradient and the same draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autobatch import Loss
from autobatch.training.validation import Validator
from tests.support.feeds import fed_loop
from tests.support.ragged import Sequences, ragged_split, ragged_workload
from tests.support.training import apart, make_loop, token_loss, weights

OPTIONS: dict[str, Any] = {"target_batch": 24, "steps": 6}


def by_size(workload: Any, limit: int = 5) -> dict[str, Any]:
    """Return the options of a loop that cuts its batches by size."""
    split = ragged_split(workload, limit)
    return {**OPTIONS, "split": split, "micro_batch": split.largest}


@pytest.mark.parametrize("limit", [1, 3, 24])
def test_the_weights_are_those_of_whole_batches(limit: int) -> None:
    workload = ragged_workload()
    whole = make_loop(workload, micro_batch=24, **OPTIONS)
    list(whole.run())
    split = make_loop(workload, **by_size(workload, limit))
    records = list(split.run())
    assert apart(weights(split.train_state.model), weights(whole.train_state.model)) <= 1e-12
    assert all(record.accumulation_steps > 1 for record in records if limit < 24)


def test_random_draws_of_the_data_belong_to_the_sample_and_not_to_the_split() -> None:
    workload = ragged_workload(train_data=Sequences(noise=0.7))
    found = []
    cut = by_size(workload)
    for options, workers in (({**OPTIONS, "micro_batch": 5}, 0), (cut, 0), (cut, 2)):
        with fed_loop(workload, workers=workers, sample_seeds=True, **options) as loop:
            list(loop.run())
        found.append(weights(loop.train_state.model))
    assert apart(found[0], found[1]) <= 1e-12
    assert torch.equal(found[1], found[2])


def test_a_validation_takes_no_more_of_the_longest_samples_than_fit() -> None:
    validated: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Loss:
        validated.append(len(batch[0]))
        return token_loss(model, batch)

    workload = ragged_workload(loss=loss, validation_data=Sequences(33))
    loop = make_loop(workload, **by_size(workload))
    Validator(loop).run()
    assert max(validated) == 5 < loop.micro_batch
