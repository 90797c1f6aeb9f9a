"""Losses of several terms, each divided by what it counts in the whole batch, against one pass in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from autobatch import InputError, Loss
from tests.support.detection import (
    CLASS_WEIGHTS,
    counts,
    detection,
    scenes,
    terms,
    two_means,
    whole,
    whole_with_mean,
    with_mean,
)
from tests.support.steps import EXACT, SAMPLES, off, step_of
from tests.support.training import Rows, reference, train_state_of, weights


def of_one(name: str) -> dict[str, Any]:
    return {"loss": lambda m, b: {name: terms(m, b)[name]}, "counts": lambda b: {name: counts(b)[name]}}


WITHOUT_BOXES = Rows(*scenes().columns[:3], torch.zeros(48, dtype=torch.bool))
LOSSES: dict[str, tuple[dict[str, Any], Any]] = {
    "counted": ({}, whole),
    "of which one counts nothing": ({"train_data": WITHOUT_BOXES}, whole),
    "beside a mean": ({**of_one("boxes"), "loss": with_mean}, whole_with_mean),
    "means only": ({"loss": two_means, "counts": None}, lambda m, b: sum(two_means(m, b).values())),
    "one with a name": (of_one("classes"), lambda m, b: cross_entropy(m(b[0])[0], b[1], CLASS_WEIGHTS)),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_steps_are_those_of_whole_batches_and_the_terms_add_up_to_the_loss(kind: str) -> None:
    changes, of_batch = LOSSES[kind]
    workload = detection(**changes)
    expected, losses = reference(workload, [range(SAMPLES), range(SAMPLES, 2 * SAMPLES)], of_batch)
    train_state = train_state_of(workload)
    results = [step_of(train_state, workload, [20, 3, 1], first) for first in (0, SAMPLES)]
    assert off(train_state, workload, expected) <= EXACT
    assert [result.loss for result in results] == pytest.approx(losses, rel=EXACT)
    assert [sum(result.terms.values()) for result in results] == pytest.approx(losses, rel=EXACT)


def always(**values: Any) -> Any:
    """Return a loss of terms with these counts, or of what functions make of a 0-d tensor."""

    def loss(model: nn.Module, _: Any) -> Any:
        zero = next(model.parameters()).sum()
        return {name: v(zero) if callable(v) else v and Loss(zero, v) for name, v in values.items()}

    return loss


def changing(first: Any, second: Any) -> Any:
    left = iter([first, second])
    return lambda model, _: next(left)(next(model.parameters()).sum())


WRONG: dict[str, dict[str, Any]] = {
    "counts=lambda batch: {'boxes': …, 'classes': …}": {"counts": None},
    "the term 'boxes' of the loss counts": {"counts": lambda _: {"boxes": 3, "classes": 9}},
    "counts=… counts boxes, ": {"counts": lambda _: {"boxes": 3}},
    "must be finite": {"counts": lambda _: {"boxes": 3, "classes": math.inf}},
    "found nan": {"counts": lambda _: {"boxes": torch.tensor(math.nan), "classes": 3}},
    "must be a number or a 0-d tensor": {"counts": lambda _: {"boxes": "3", "classes": 3}},
    "must return a mapping of": {"counts": lambda _: 3},
    "found an empty one": {"counts": lambda _: {}},
    "found none": {"loss": always(), "counts": None},
    "other than 'loss'": {"loss": always(loss=1.0), "counts": None},
    "the term 'a' of the workload's loss must return a 0-d tensor or a Loss, found nothing (None): return": {
        "loss": always(a=None),
        "counts": None,
    },
    "at least 0, found -1": {"loss": always(a=-1.0), "counts": lambda _: {"a": 1}},
    "counts nan items of a batch": {
        "loss": always(a=lambda zero: Loss(zero, torch.tensor(math.nan))),
        "counts": lambda _: {"a": 1},
    },
    "returned other terms for one micro-batch than for another": {
        "loss": changing(lambda zero: zero, lambda zero: Loss(zero, 1)),
        "counts": None,
    },
}


@pytest.mark.parametrize("said", WRONG)
def test_wrong_terms_and_counts_are_one_line_and_move_nothing(said: str) -> None:
    workload = detection(**WRONG[said])
    train_state = train_state_of(workload)
    before = weights(train_state.model)
    with pytest.raises(InputError) as caught:
        step_of(train_state, workload, [12, 12])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert torch.equal(weights(train_state.model), before)
