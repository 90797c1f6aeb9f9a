"""The error of a loop on the user's data, against gradients taken by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from autobatch.integrations.loop_error import gradient_error, last_step_note
from autobatch.workload.contract import Collated
from autobatch.workload.data import load_micro_batch
from autobatch.workload.order import permutation
from tests.support.custom_loops import mean_over_tokens
from tests.support.trainers import gradient_of, weights_of
from tests.support.training import language_model, make_workload, mean_loss, tokens

CPU = torch.device("cpu")
MEAN = make_workload()
TOKENS = make_workload(model=lambda: language_model().float(), train_data=tokens())


def of_means(model: nn.Module, batches: list[Collated]) -> Iterator[Tensor]:
    for batch in batches:
        loss = mean_over_tokens if batch[1].dim() > 1 else mean_loss
        yield loss(model, batch) / len(batches)


def summed(model: nn.Module, batches: list[Collated]) -> Iterator[Tensor]:
    for batch in batches:
        yield mean_over_tokens(model, batch)


def test_a_mean_over_samples_is_exact() -> None:
    error, note = gradient_error(MEAN, of_means, CPU, size=12, steps=3)
    assert error is not None
    assert error < 1e-5
    assert note == (
        "its accumulation is exact to rounding, measured on 12 of your samples in 3 micro-batches of 4"
    )


def test_a_mean_of_means_is_off_by_what_the_gradients_say() -> None:
    torch.manual_seed(0)
    model = TOKENS.model()
    workload = make_workload(model=lambda: model, train_data=tokens())
    before = weights_of(model)
    error, note = gradient_error(workload, of_means, CPU, size=12, steps=5)
    assert torch.equal(weights_of(model), before)
    assert all(p.grad is None for p in model.parameters())
    ids = permutation(len(workload.train_data), seed=0, epoch=0)[:12]
    parts = [load_micro_batch(workload, ids[n : n + 3]) for n in (0, 3, 6, 9)]
    model.eval()
    whole = gradient_of(model, mean_over_tokens(model, load_micro_batch(workload, ids)))
    split = gradient_of(model, *of_means(model, parts))
    assert error == pytest.approx(float((split - whole).norm() / whole.norm()), rel=1e-3)
    assert error > 0.01
    assert note is not None
    assert "12 of your samples in 4 micro-batches of 3, because each micro-batch has the same weight" in note


def test_a_sum_that_nothing_divides_is_named() -> None:
    error, note = gradient_error(TOKENS, summed, CPU, size=12, steps=3)
    assert error is not None
    assert error > 1
    assert note is not None
    assert "because the losses are summed over micro-batches and not divided" in note


def test_a_step_of_one_micro_batch_needs_no_measurement() -> None:
    assert gradient_error(MEAN, of_means, CPU, size=24, steps=1) == (None, None)
    error, note = gradient_error(MEAN, of_means, CPU, size=1, steps=24)
    assert error is None
    assert note is not None
    assert "because only one sample fits at a time" in note


def test_small_micro_batches_are_measured_in_fewer_parts() -> None:
    error, note = gradient_error(TOKENS, of_means, CPU, size=2, steps=16)
    assert error is not None
    assert note is not None
    assert "measured on 2 of your samples in 2 micro-batches of 1" in note


def test_a_loss_that_raises_is_a_remark() -> None:
    def broken(model: nn.Module, batches: list[Collated]) -> Iterator[Tensor]:
        raise KeyError("labels")
        yield

    error, note = gradient_error(MEAN, broken, CPU, size=12, steps=3)
    assert error is None
    assert note == "the error of its accumulation could not be measured: KeyError: 'labels'"


SHORT = (
    "the last step of each epoch has 16 of 24 samples in 2 of 3 micro-batches and is still divided by 3, so "
    "its gradient is 33% too small"
)
HEAVY = (
    "the last step of each epoch has 18 of 24 samples; the samples of its last micro-batch "
    "weigh 4 times as much"
)


@pytest.mark.parametrize(
    ("epoch", "divides", "averages", "drop", "words"),
    [
        (None, True, True, False, None),
        (48, True, True, False, None),
        (40, True, True, False, SHORT),
        (42, True, True, False, HEAVY),
        (42, False, False, False, "the last step of each epoch has 18 of 24 samples"),
        (42, True, True, True, SHORT),
        (30, True, True, True, None),
    ],
)
def test_the_last_step_of_an_epoch(
    epoch: int | None, divides: bool, averages: bool, drop: bool, words: str | None
) -> None:
    note = last_step_note(epoch, 24, 8, 3, divides_by_plan=divides, averages_means=averages, drop_last=drop)
    assert note == (None if words is None else f"{words}: autobatch.batches carries them into the next epoch")
