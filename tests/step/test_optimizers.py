"""The optimizer function of a workload: what it is given, and what it may return."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.optim import SGD

from autobatch import InputError
from autobatch.step.train_state import build_optimizers
from tests.support.training import make_workload, train_state_of


@pytest.mark.parametrize(
    ("optimizer", "sizes"),
    [
        (lambda model, lr: SGD(model[0].parameters(), lr=lr), [2]),
        (
            lambda named_parameters, rate: SGD([{"params": [p]} for _, p in named_parameters], lr=rate),
            [1] * 4,
        ),
        (lambda params, lr: SGD(params, lr=lr), [4]),
    ],
)
def test_the_name_of_the_argument_tells_what_is_given(optimizer: Any, sizes: list[int]) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    (made,) = build_optimizers(make_workload(optimizer=optimizer), model, 0.1)
    assert [len(group["params"]) for group in made.param_groups] == sizes


class ScheduleFree(SGD):
    """An optimizer with other weights for its evaluation."""

    def train(self) -> None:
        """Switch to the weights that train."""

    def eval(self) -> None:
        """Switch to their average."""


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (lambda params, lr: None, "found nothing"),
        (lambda params, lr: [SGD(params, lr=lr), 3], "found an int"),
        (lambda params, lr: ScheduleFree(params, lr=lr), r"^ScheduleFree switches its weights .* AdamW"),
    ],
)
def test_an_invalid_optimizer_is_refused(optimizer: Any, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        train_state_of(make_workload(optimizer=optimizer))
    assert "\n" not in str(caught.value)
