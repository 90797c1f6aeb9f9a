"""The optimizer function of a workload: what it is given, what it may return, and how modes are switched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from autobatch.core.errors import InputError
from autobatch.step.optimizers import argument_of, averaged_weights, build_optimizers, switch, take_step
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


def by_name(named_parameters: Any, learning_rate: float) -> torch.optim.Optimizer:
    groups = [{"params": [p], "weight_decay": 0.1 * (p.dim() > 1)} for _, p in named_parameters]
    return torch.optim.AdamW(groups, lr=learning_rate)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def test_the_name_of_the_argument_tells_what_is_given() -> None:
    net = model()
    (of_model,) = build_optimizers(make_workload(optimizer=by_model), net, 0.1)
    assert [tuple(p.shape) for p in of_model.param_groups[0]["params"]] == [(3, 2), (3,)]
    (of_names,) = build_optimizers(make_workload(optimizer=by_name), net, 0.1)
    assert [group["weight_decay"] for group in of_names.param_groups] == [0.1, 0.0, 0.1, 0.0]
    plain = make_workload(optimizer=lambda params, rate: torch.optim.SGD(params, lr=rate))
    assert len(build_optimizers(plain, net, 0.1)[0].param_groups[0]["params"]) == 4


@pytest.mark.parametrize("name", ["model", "module"])
def test_both_names_give_the_model(name: str) -> None:
    net = model()
    workload = make_workload(optimizer=eval(f"lambda {name}, rate: None"))
    assert argument_of(workload, net) is net


def test_a_class_without_a_signature_gets_parameters() -> None:
    net = model()
    assert len(list(argument_of(make_workload(optimizer=torch.optim.SGD), net))) == 4


def test_pairs_of_names_may_be_given_to_torch_itself() -> None:
    workload = make_workload(optimizer=lambda named_params, rate: torch.optim.SGD(named_params, lr=rate))
    (made,) = build_optimizers(workload, model(), 0.1)
    assert made.param_groups[0]["param_names"] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_an_optimizer_that_needs_a_closure_is_refused_by_name() -> None:
    workload = make_workload(optimizer=lambda params, rate: torch.optim.LBFGS(params, lr=rate))
    with pytest.raises(InputError, match=r"^LBFGS needs a closure, which runs the loss .* for example AdamW"):
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


def test_training_weights_return_after_an_error() -> None:
    optimizers = build_optimizers(
        make_workload(optimizer=lambda p, rate: Averaging(p, lr=rate)), model(), 0.1
    )
    with pytest.raises(KeyError), averaged_weights(optimizers):
        raise KeyError
    assert optimizers[0].modes[-1] == "train"  # type: ignore[attr-defined]


class Halving(torch.optim.SGD):
    """An optimizer with a step of its own around that of its class."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] /= 2
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, Halving])
def test_a_step_is_that_of_the_optimizer(kind: type[torch.optim.Optimizer]) -> None:
    weights = []
    for act in (take_step, lambda optimizer: optimizer.step()):
        weight = nn.Parameter(torch.ones(3))
        optimizer = kind([weight], lr=0.1)
        for _ in range(2):
            weight.grad = torch.arange(3.0)
            act(optimizer)
        weights.append(weight.detach())
    assert torch.equal(*weights)


def test_everyone_who_listens_to_steps_hears_of_them() -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    heard = []
    optimizer = torch.optim.SGD([weight], lr=0.1)
    own = [
        optimizer.register_step_pre_hook(lambda *_: heard.append("before")),
        optimizer.register_step_post_hook(lambda *_: heard.append("after")),
    ]
    take_step(optimizer)
    for hook in own:
        hook.remove()
    of_all = register_optimizer_step_post_hook(lambda *_: heard.append("any"))
    take_step(optimizer)
    of_all.remove()
    take_step(optimizer)
    assert heard == ["before", "after", "any"]
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    take_step(optimizer)
    schedule.step()  # warns if it has not heard of the step before it
    with torch.profiler.profile(acc_events=True) as profile:
        take_step(optimizer)
    assert "Optimizer.step#SGD.step" in {event.key for event in profile.key_averages()}
