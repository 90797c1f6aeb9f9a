"""Losses of several terms, each divided by what it counts in the whole batch, against one pass in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from autobatch import InputError, Loss, Workload
from autobatch.device.base import SilentMeter
from autobatch.step.train_step import train_step
from tests.support.detection import (
    Detector,
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
from tests.support.training import reference

SPLITS = [[24], [12, 12], [5] * 4 + [4], [1] * 24, [20, 3, 1]]


def count_boxes(batch: Any) -> dict[str, float]:
    return {"boxes": counts(batch)["boxes"]}


LOSSES: dict[str, tuple[dict[str, Any], Callable[..., Tensor]]] = {
    "counted": ({}, whole),
    "beside a mean": (
        {"loss": with_mean, "counts": count_boxes},
        whole_with_mean,
    ),
    "means only": ({"loss": two_means, "counts": None}, lambda m, b: sum(two_means(m, b).values())),
    "one with a name": (
        {
            "loss": lambda m, b: {"classes": terms(m, b)["classes"]},
            "counts": lambda b: {"classes": counts(b)["classes"]},
        },
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


def test_terms_without_counts_are_told_what_to_write() -> None:
    workload = detection(counts=None)
    train_state = train_state_of(workload)
    before = [one.clone() for one in train_state.model.parameters()]
    with pytest.raises(InputError, match=r"Workload\(counts=lambda batch: \{'boxes': …, 'classes': …\}\)"):
        step_of(train_state, workload, [12, 12])
    assert all(map(torch.equal, train_state.model.parameters(), before))


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


def test_the_norm_the_clipping_and_the_scale_of_fp16_are_those_of_the_whole_batch() -> None:
    workload = detection()
    expected, _ = reference(workload, [range(SAMPLES)], whole, clip=1e-2)
    train_state = train_state_of(workload, max_grad_norm=1e-2)
    train_state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    assert step_of(train_state, workload, [5, 1, 18]).applied
    assert off(train_state, workload, expected) <= EXACT


def counts_of_names(value: Any) -> Any:
    """Return counts of the names that the first of these losses has; None for a single loss."""
    first = value[0] if isinstance(value, list) else value
    terms = first if isinstance(first, dict) else first(torch.zeros(()))
    names = [*terms] if isinstance(terms, dict) else []
    return (lambda batch: dict.fromkeys(names, len(batch[0]))) if names else None


def returning(value: Any) -> Workload:
    """Return a workload whose loss returns this, or the values of a list in turn."""
    left = iter(value if isinstance(value, list) else [value] * 9)

    def loss(model: nn.Module, _: Any) -> Any:
        found, zero = next(left), next(model.parameters()).sum()
        if isinstance(found, dict):
            return {name: one and Loss(zero, one) for name, one in found.items()}
        return found(zero)

    return detection(loss=loss, counts=counts_of_names(value))


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ({}, "found none"),
        ({"loss": 1.0, "boxes": 1.0}, "other than 'loss'"),
        ({"boxes": None}, "the term 'boxes' of the workload's loss must return a 0-d tensor or a Loss"),
        ({"boxes": -1.0}, "must be finite and at least 0, found -1"),
        (lambda zero: {"boxes": Loss(zero, torch.tensor(math.nan))}, "counts nan items of a batch"),
        (lambda zero: {"boxes": Loss(zero, torch.tensor(-1.0))}, "counts -2 items of a batch"),
        (lambda zero: {"boxes": Loss(zero[None], 1)}, "as the total of its Loss"),
        (lambda zero: (zero, zero), "found a tuple"),
        ([{"a": 1.0}, {"b": 1.0}], "a (a Loss) for one micro-batch and b (a Loss) for another: return the"),
        ([{"a": 1.0}, lambda zero: zero], "a (a Loss) for one micro-batch and a tensor for another: return"),
        ([lambda zero: zero, lambda zero: Loss(zero, 1)], "a tensor for one micro-batch and a Loss for"),
        ([{"a": one} for one in (1.0, 1.0)], "counts 2 items of a batch while it trains, and 24"),
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


def test_wrong_counts_are_refused_before_the_step() -> None:
    for given, found in (
        ({"boxes": 3, "classes": 9}, "the term 'boxes' of the loss counts"),
        ({"boxes": 3}, "counts=… counts boxes, and the terms of the loss that have a count are"),
        ({"boxes": 3, "classes": math.inf}, "must be finite"),
        ({"boxes": "3"}, "must be a number or a 0-d tensor"),
        (3, "must return a mapping"),
    ):
        workload = detection(counts=lambda _, given=given: given)
        train_state = train_state_of(workload)
        before = [one.clone() for one in train_state.model.parameters()]
        with pytest.raises(InputError) as caught:
            step_of(train_state, workload, [12, 12])
        assert found in str(caught.value)
        assert all(map(torch.equal, train_state.model.parameters(), before))
