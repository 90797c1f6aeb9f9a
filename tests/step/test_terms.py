"""Losses of several terms, each divided by what it counts in the whole batch, against one pass in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from autobatch import InputError, Loss, Workload
from autobatch.device.base import SilentMeter
from autobatch.step.train_step import train_step
from tests.support.detection import (
    Batch,
    Detector,
    boxes_only,
    counts,
    detection,
    scenes,
    terms,
    two_means,
    whole,
    whole_with_mean,
    with_mean,
)
from tests.support.steps import CLASS_WEIGHTS, EXACT, SAMPLES, off, split, train_state_of
from tests.support.training import Rows, reference, weights

SPLITS = [[24], [12, 12], [5] * 4 + [4], [1] * 24, [20, 3, 1]]
LOSSES: dict[str, tuple[dict[str, Any], Callable[..., Tensor]]] = {
    "counted first": ({"loss": terms}, whole),
    "counted by the data": ({"loss": terms, "counts": counts}, whole),
    "a sequence": ({"loss": lambda m, b: list(terms(m, b).values())}, whole),
    "beside a mean": ({"loss": with_mean}, whole_with_mean),
    "means only": ({"loss": two_means}, lambda m, b: sum(two_means(m, b).values())),
    "one with a name": (
        {"loss": lambda m, b: {"classes": terms(m, b)["classes"]}},
        lambda m, b: cross_entropy(m(b[0])[0], b[1], CLASS_WEIGHTS),
    ),
}


class Seen(Detector):
    """A detector that counts the samples of its forward passes in a buffer."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        self.seen += len(inputs)
        return super().forward(inputs)


def step_of(train_state: Any, workload: Workload, sizes: list[int], first: int = 0) -> Any:
    """Take a step over the next samples, with the micro-batches as the loop feeds them."""
    fed = train_state.feed(iter(split(workload, sizes, first)), SilentMeter())
    return train_step(train_state, fed, sum(sizes))


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("sizes", SPLITS)
def test_any_split_takes_the_step_of_the_whole_batch(kind: str, sizes: list[int]) -> None:
    changes, of_batch = LOSSES[kind]
    workload = detection(model=lambda: Seen().double(), **changes)
    expected, losses = reference(workload, [range(SAMPLES), range(SAMPLES, 2 * SAMPLES)], of_batch)
    train_state = train_state_of(workload)
    found = [step_of(train_state, workload, sizes, first) for first in (0, SAMPLES)]
    assert off(train_state, workload, expected) <= EXACT
    assert [one.loss for one in found] == pytest.approx(losses, rel=EXACT)
    assert all(sum(one.terms.values()) == pytest.approx(one.loss, rel=EXACT) for one in found)
    assert train_state.model.seen == 2 * SAMPLES, "the first pass leaves no trace in buffers"


@pytest.mark.parametrize("given", [None, counts])
def test_both_passes_draw_the_same(given) -> None:
    """The state after the batch, too, is that of one pass over it."""
    workload = detection(model=lambda: Detector(0.5).double(), counts=given)
    alone = detection(model=lambda: Detector(0.5).double(), loss=lambda m, b: whole_of(m, b, items))
    items = {
        name: sum(float(counts(b)[name]) for b, _ in split(workload, [9, 15]))
        for name in ("boxes", "classes")
    }
    ends = []
    for one in (workload, alone):
        train_state = train_state_of(one)
        step_of(train_state, one, [9, 15])
        ends.append((weights(train_state.model), torch.get_rng_state()))
    assert torch.allclose(ends[0][0], ends[1][0], rtol=EXACT, atol=EXACT)
    assert torch.equal(ends[0][1], ends[1][1])


def whole_of(model: nn.Module, batch: Batch, items: dict[str, float]) -> Loss:
    """The terms with the divisors of the whole batch, as a sum over samples: one pass is enough."""
    found = terms(model, batch)
    total = sum(one.total / items[name] for name, one in found.items()) * SAMPLES
    return Loss(total, len(batch[0]))


def test_a_term_that_counts_nothing_adds_nothing_and_is_not_told() -> None:
    data = scenes()
    data.columns[3][:] = False
    workload = detection(train_data=data)
    for sizes in ([24], [9, 15]):
        expected, losses = reference(workload, [range(SAMPLES)], whole)
        train_state = train_state_of(workload)
        result = step_of(train_state, workload, sizes)
        assert off(train_state, workload, expected) <= EXACT
        assert result.loss == pytest.approx(losses[0], rel=EXACT)
        assert list(result.terms) == ["classes"]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_no_step_is_taken_if_no_term_counts_anything(precision) -> None:
    data = scenes()
    data.columns[3][:SAMPLES] = False
    workload = detection(
        model=Detector,
        train_data=Rows(*(one.float() if one.is_floating_point() else one for one in data.columns)),
        loss=boxes_only,
    )
    train_state = train_state_of(workload, precision=precision)
    before = [one.clone() for one in train_state.model.parameters()]
    result = step_of(train_state, workload, [9, 15])
    assert (result.applied, result.count, result.terms) == (False, 0.0, {})
    assert math.isnan(result.loss)
    assert all(map(torch.equal, train_state.model.parameters(), before))
    assert step_of(train_state, workload, [9, 15], SAMPLES).applied


def test_the_norm_the_clipping_and_the_scale_of_fp16_are_those_of_the_whole_batch() -> None:
    workload = detection()
    expected, _ = reference(workload, [range(SAMPLES)], whole, clip=1e-2)
    train_state = train_state_of(workload, max_grad_norm=1e-2)
    train_state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    assert step_of(train_state, workload, [5, 1, 18]).applied
    assert off(train_state, workload, expected) <= EXACT


def returning(value: Any) -> Workload:
    """Return a workload whose loss returns this, or the values of a list in turn."""
    left = iter(value if isinstance(value, list) else [value] * 9)

    def loss(model: nn.Module, _: Any) -> Any:
        found, zero = next(left), next(model.parameters()).sum()
        if isinstance(found, dict):
            return {name: one and Loss(zero, one) for name, one in found.items()}
        return found(zero)

    return detection(loss=loss)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ({}, "needs a name for each, found none"),
        ({"loss": 1.0, "boxes": 1.0}, "'loss', 'boxes', whose sum is the loss"),
        ({"boxes": None}, "the term 'boxes' of the workload's loss must be a 0-d tensor or a Loss, found"),
        ({"boxes": -1.0}, "the count of the term 'boxes' must be finite and at least 0, found -1"),
        (lambda zero: {"boxes": Loss(zero, torch.tensor(math.nan))}, "count of the term 'boxes' must be"),
        (lambda zero: {"boxes": Loss(zero, torch.tensor(-1.0))}, "found -1 for a micro-batch"),
        (lambda zero: {"boxes": Loss(zero[None], 1)}, "the total of the term 'boxes' must be a 0-d tensor"),
        (lambda zero: (zero, zero), "found a tuple of a tensor of shape (), a tensor of shape ()"),
        (lambda _: [], "found a list of nothing"),
        ([{"a": 1.0}, {"b": 1.0}], "a (a Loss) for one micro-batch and b (a Loss) for another: return the"),
        ([{"a": 1.0}, lambda zero: zero], "a (a Loss) for one micro-batch and a tensor for another: return"),
        ([lambda zero: zero, lambda zero: Loss(zero, 1)], "a tensor for one micro-batch and a Loss for"),
        ([{"a": one} for one in (1.0, 2.0, 1.0, 1.0)], "counts 2 items of a batch while it trains, and 3"),
    ],
)
def test_a_wrong_loss_is_one_line_and_moves_nothing(value: Any, found: str) -> None:
    workload = returning(value)
    train_state = train_state_of(workload)
    before = [one.clone() for one in train_state.model.parameters()]
    with pytest.raises(InputError) as caught:
        step_of(train_state, workload, [12, 12])
    assert found in str(caught.value)
    assert "\n" not in str(caught.value)
    assert all(map(torch.equal, train_state.model.parameters(), before))


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (lambda _: {"boxes": 3, "classes": 9}, "the term 'boxes' of the loss counts"),
        (
            lambda _: {"boxes": 3},
            "counts=… counts boxes, and the terms of the loss that have a count are",
        ),
        (lambda _: {"boxes": 3, "classes": math.inf}, "the count of the term 'classes' must be finite"),
        (
            lambda _: {"boxes": "3"},
            "the count of 'boxes' in counts=… must be a number or a 0-d tensor",
        ),
        (
            lambda _: 3,
            "counts=… must return a mapping of the names of terms to their counts, found an int",
        ),
    ],
)
def test_wrong_counts_are_refused_before_the_step(given, found: str) -> None:
    workload = detection(counts=given)
    train_state = train_state_of(workload)
    before = [one.clone() for one in train_state.model.parameters()]
    with pytest.raises(InputError) as caught:
        step_of(train_state, workload, [12, 12])
    assert found in str(caught.value)
    assert all(map(torch.equal, train_state.model.parameters(), before))


def test_counts_beside_a_loss_without_counted_terms_are_refused() -> None:
    workload = detection(loss=lambda m, b: cross_entropy(m(b[0])[0], b[1]), counts=counts)
    with pytest.raises(InputError, match="the loss that have a count are none: count these"):
        step_of(train_state_of(workload), workload, [12, 12])


def test_a_buffer_too_large_to_keep_is_refused_unless_the_data_tell_the_counts() -> None:
    class Queued(Detector):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue", torch.zeros(2**18 + 1))

        def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
            self.queue[0] += 1
            return super().forward(inputs)

    workload = detection(model=lambda: Queued().double())
    with pytest.raises(InputError, match="large buffer of the model: give Workload"):
        step_of(train_state_of(workload), workload, [12, 12])
    known = replace(workload, counts=counts)
    assert step_of(train_state_of(known), known, [12, 12]).applied


def test_a_loss_that_needs_no_second_pass_keeps_no_batch() -> None:
    """The first micro-batch of a run alone is kept, until its loss is known."""
    workload = detection(loss=two_means)
    train_state = train_state_of(workload)
    fed = train_state.feed(iter(split(workload, [8] * 3)), SilentMeter())
    train_step(train_state, fed, SAMPLES)
    assert list(fed) == []
