"""The optimizer function of a workload: what it is given, what it may return, and how modes are switched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autobatch import InputError
from autobatch.step.optimizers import averaged_weights, build_optimizers, switch
from tests.support.custom_loops import Sam
from tests.support.steps import train_state_of
from tests.support.training import make_workload


class Averaging(torch.optim.SGD):
    """An optimizer with two sets of weights, as schedule-free ones have, that records its modes."""

    modes: list[str]

    def train(self) -> None:
        self.modes = [*getattr(self, "modes", []), "train"]

    def eval(self) -> None:
        self.modes = [*self.modes, "eval"]


def by_model(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.get_submodule("0").parameters(), lr=lr)


def by_module(module: nn.Module, lr: float) -> torch.optim.Optimizer:
    return by_model(module, lr)


def by_name(named_parameters: Any, learning_rate: float) -> torch.optim.Optimizer:
    groups = [{"params": [p], "weight_decay": 0.1 * (p.dim() > 1)} for _, p in named_parameters]
    return torch.optim.AdamW(groups, lr=learning_rate)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def test_the_name_of_the_argument_tells_what_is_given() -> None:
    net = model()
    for optimizer in (by_model, by_module):
        (of_model,) = build_optimizers(make_workload(optimizer=optimizer), net, 0.1)
        assert [tuple(p.shape) for p in of_model.param_groups[0]["params"]] == [(3, 2), (3,)]
    (of_names,) = build_optimizers(make_workload(optimizer=by_name), net, 0.1)
    assert [group["weight_decay"] for group in of_names.param_groups] == [0.1, 0.0, 0.1, 0.0]
    plain = make_workload(optimizer=lambda params, rate: torch.optim.SGD(params, lr=rate))
    assert len(build_optimizers(plain, net, 0.1)[0].param_groups[0]["params"]) == 4


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (torch.optim.LBFGS, r"^LBFGS needs a closure, which runs the loss .* for example AdamW"),
        (Sam, r"^Sam has two steps per batch .* two autobatch\.batches"),
    ],
)
def test_an_optimizer_with_another_kind_of_step_is_refused_by_name(kind: Any, message: str) -> None:
    workload = make_workload(optimizer=lambda params, rate: kind(params, lr=rate))
    with pytest.raises(InputError, match=message):
        build_optimizers(workload, model(), 0.1)


def test_modes_are_switched_for_optimizers_that_have_them() -> None:
    workload = make_workload(
        optimizer=lambda params, rate: [Averaging(params := list(params), lr=rate), torch.optim.SGD(params)]
    )
    optimizers = build_optimizers(workload, model(), 0.1)
    with averaged_weights(optimizers):
        assert optimizers[0].modes == ["train", "eval"]  # type: ignore[attr-defined]
    switch(optimizers, train=False)
    assert optimizers[0].modes == ["train", "eval", "train", "eval"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (lambda params, lr: None, "found nothing"),
        (lambda params, lr: [torch.optim.SGD(params, lr=lr), 3], "found an int"),
        (lambda params, lr: torch.optim.SGD([torch.zeros(1)], lr=lr), "found 0 of 1"),
    ],
)
def test_an_invalid_optimizer_is_refused(optimizer, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        train_state_of(make_workload(optimizer=optimizer))
    assert "\n" not in str(caught.value)
