"""One optimizer step in micro-batches against one pass over the whole window, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from autobatch.planning import micro_batches
from autobatch.step.train_step import train_step
from autobatch.workload.contract import Loss
from tests.support.steps import EXACT, SAMPLES, off, split, train_state_of
from tests.support.training import (
    IGNORED,
    language_model,
    make_workload,
    mean_loss,
    reference,
    token_loss,
    tokens,
    weights,
)


def whole_tokens(model: nn.Module, batch) -> torch.Tensor:
    ids, labels = batch
    return cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.7], dtype=torch.float64)


def weighted(model: nn.Module, batch) -> Loss:
    inputs, labels = batch
    total = cross_entropy(model(inputs), labels, weight=CLASS_WEIGHTS, reduction="sum")
    return Loss(total, CLASS_WEIGHTS[labels].sum())


def whole_weighted(model: nn.Module, batch) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1], weight=CLASS_WEIGHTS)


KINDS = {
    "mean": ({}, mean_loss),
    "tokens": ({"model": language_model, "train_data": tokens(), "loss": token_loss}, whole_tokens),
    "class weights": ({"loss": weighted}, whole_weighted),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", range(1, SAMPLES + 1))
def test_any_split_takes_the_step_of_the_whole_window(kind: str, parts: int) -> None:
    changes, whole = KINDS[kind]
    workload = make_workload(**changes)
    expected, losses = reference(workload, [range(SAMPLES)], whole)
    train_state = train_state_of(workload)
    result = train_step(
        train_state, split(workload, micro_batches(SAMPLES, math.ceil(SAMPLES / parts))), SAMPLES
    )
    assert off(train_state, workload, expected) <= EXACT
    assert result.loss == pytest.approx(losses[0], rel=EXACT)
    assert result.applied
    assert all(p.grad is None for p in train_state.model.parameters())


@pytest.mark.parametrize("sizes", [[1, 23], [20, 3, 1], [7, 7, 7, 3], [1] * 23 + [1]])
@pytest.mark.parametrize("kind", KINDS)
def test_ragged_sizes_are_weighted_by_what_they_count(kind: str, sizes: list[int]) -> None:
    changes, whole = KINDS[kind]
    workload = make_workload(**changes)
    expected, _ = reference(workload, [range(SAMPLES)], whole)
    train_state = train_state_of(workload)
    train_step(train_state, split(workload, sizes), SAMPLES)
    assert off(train_state, workload, expected) <= EXACT


def test_the_oracle_tells_a_mean_of_means_from_the_whole() -> None:
    """The comparison has teeth: weighting all micro-batches alike fails it by ten orders of magnitude."""
    workload = make_workload(**KINDS["tokens"][0])
    expected, _ = reference(workload, [range(SAMPLES)], whole_tokens)
    mutant = make_workload(**{**KINDS["tokens"][0], "loss": whole_tokens})
    train_state = train_state_of(mutant)
    train_step(train_state, split(mutant, [4] * 6), SAMPLES)
    assert off(train_state, workload, expected) > 1e-2


def test_counts_divided_in_float32_would_be_seen() -> None:
    workload = make_workload(**KINDS["tokens"][0])
    expected, _ = reference(workload, [range(SAMPLES)], whole_tokens)

    def in_float32(model: nn.Module, batch) -> Loss:
        total, count = token_loss(model, batch)
        share = count / torch.tensor(7)  # integers divided as tensors: float32
        return Loss(total * (share.double() / (count.double() / 7.0).clamp(min=1e-9)), count)

    mutant = make_workload(**{**KINDS["tokens"][0], "loss": in_float32})
    train_state = train_state_of(mutant)
    train_step(train_state, split(mutant, [4] * 6), SAMPLES)
    assert off(train_state, workload, expected) > EXACT


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_a_micro_batch_that_counts_nothing_adds_nothing(empty: int) -> None:
    data = tokens()
    data.columns[1][empty * 8 : empty * 8 + 8] = IGNORED
    workload = make_workload(model=language_model, train_data=data, loss=token_loss)
    expected, losses = reference(workload, [range(SAMPLES)], whole_tokens)
    train_state = train_state_of(workload)
    result = train_step(train_state, split(workload, [8, 8, 8]), SAMPLES)
    assert off(train_state, workload, expected) <= EXACT
    assert result.loss == pytest.approx(losses[0], rel=EXACT)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_window_that_counts_nothing_takes_no_step_and_the_next_one_does(precision) -> None:
    data = tokens(48)
    data.columns[1][:24] = IGNORED
    workload = make_workload(
        model=lambda: language_model(torch.float32),
        train_data=data,
        loss=token_loss,
        optimizer=lambda params, lr: torch.optim.AdamW(params, lr=lr, weight_decay=0.5),
    )
    train_state = train_state_of(workload, precision=precision)
    before = weights(train_state.model)
    result = train_step(train_state, split(workload, [8, 8, 8]), SAMPLES)
    assert (result.applied, result.count) == (False, 0.0)
    assert math.isnan(result.loss)
    assert torch.equal(weights(train_state.model), before)
    assert not train_state.optimizers[0].state
    after = train_step(train_state, split(workload, [8, 8, 8], first=24), SAMPLES)
    assert after.applied
    assert math.isfinite(after.loss)


def test_a_constant_where_nothing_counts_will_do() -> None:
    def loss(model: nn.Module, batch) -> Loss:
        found = token_loss(model, batch)
        return found if found.count else Loss(torch.zeros(()), 0)

    data = tokens()
    data.columns[1][:8] = IGNORED
    workload = make_workload(model=language_model, train_data=data, loss=loss)
    expected, _ = reference(workload, [range(SAMPLES)], whole_tokens)
    train_state = train_state_of(workload)
    train_step(train_state, split(workload, [8, 8, 8]), SAMPLES)
    assert off(train_state, workload, expected) <= EXACT


@pytest.mark.parametrize("count", [int, float, torch.as_tensor, lambda c: torch.as_tensor(c).float()])
def test_a_count_may_be_a_number_or_a_tensor(count) -> None:
    def loss(model: nn.Module, batch) -> Loss:
        found = token_loss(model, batch)
        return Loss(found.total, count(found.count))

    workload = make_workload(**{**KINDS["tokens"][0], "loss": loss})
    expected, _ = reference(workload, [range(SAMPLES)], whole_tokens)
    train_state = train_state_of(workload)
    train_step(train_state, split(workload, [5, 19]), SAMPLES)
    assert off(train_state, workload, expected) <= EXACT


@pytest.mark.parametrize("clip", [1e-3, 0.1, 1e3])
def test_clipping_is_that_of_the_whole_window(clip: float) -> None:
    workload = make_workload(**KINDS["tokens"][0])
    expected, _ = reference(workload, [range(SAMPLES)], whole_tokens, clip=clip)
    train_state = train_state_of(workload, max_grad_norm=clip)
    train_step(train_state, split(workload, [5, 1, 18]), SAMPLES)
    assert off(train_state, workload, expected) <= EXACT


def test_the_norm_is_that_of_the_whole_window_before_clipping() -> None:
    workload = make_workload()
    torch.manual_seed(0)
    model = workload.model()
    mean_loss(model, next(split(workload, [SAMPLES]))[0]).backward()
    expected = float(nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    result = train_step(train_state_of(workload, max_grad_norm=1e-3), split(workload, [7, 17]), SAMPLES)
    assert result.grad_norm == pytest.approx(expected, rel=EXACT)
