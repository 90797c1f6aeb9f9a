"""The optimizer function of a workload: what it is given, and what it may return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autobatch import InputError
from autobatch.step.optimizers import build_optimizers
from tests.support.custom_loops import Sam
from tests.support.training import make_workload, train_state_of


def by_model(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.get_submodule("0").parameters(), lr=lr)


def by_name(named_parameters: Any, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [p]} for _, p in named_parameters], lr=learning_rate)


def plain(params: Any, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=rate)


def test_the_name_of_the_argument_tells_what_is_given() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    for optimizer, sizes in {by_model: [2], by_name: [1] * 4, plain: [4]}.items():
        (made,) = build_optimizers(make_workload(optimizer=optimizer), model, 0.1)
        assert [len(group["params"]) for group in made.param_groups] == sizes


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (lambda params, lr: None, "found nothing"),
        (lambda params, lr: [torch.optim.SGD(params, lr=lr), 3], "found an int"),
        (lambda params, lr: torch.optim.SGD([torch.zeros(1)], lr=lr), "found 0 of 1"),
        (lambda params, lr: torch.optim.LBFGS(params, lr=lr), "^LBFGS runs the loss .* AdamW"),
        (lambda params, lr: Sam(params, lr=lr), r"^Sam runs the loss .* two autobatch\.batches"),
    ],
)
def test_an_invalid_optimizer_is_refused(optimizer: Any, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        train_state_of(make_workload(optimizer=optimizer))
    assert "\n" not in str(caught.value)
