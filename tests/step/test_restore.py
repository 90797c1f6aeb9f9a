"""What is lent comes back as it was, whatever happened meanwhile; and so do the random states."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from autobatch.core.errors import InputError
from autobatch.device.cpu import CpuDevice
from autobatch.probing.attempt import TrainSetup, attempt
from autobatch.step.restore import temporary_weights
from autobatch.workload.data import WorstCaseSampler
from autobatch.workload.rng import capture_random_state, restore_random_state
from tests.support.training import fingerprint, make_workload, points

CPU = torch.device("cpu")


class Tied(nn.Module):
    """Ties, a frozen part, statistics, and buffers that a forward pass replaces and adds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 3).requires_grad_(requires_grad=False)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, inputs):
        self.mean = self.mean + inputs.detach().mean(0)
        if "late" not in self._buffers:
            self.register_buffer("late", torch.ones(()))
            self.extra = nn.Linear(1, 1)
        self.head.requires_grad_(requires_grad=True)
        return self.head(self.drop(self.norm(self.second(self.first(inputs))))) * self.late


def looks(model: nn.Module) -> dict[str, object]:
    """Everything about a model that a caller could notice."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    return {
        "sha256": fingerprint(model),
        "objects": {name: id(tensor) for name, tensor in tensors.items()},
        "memory": {name: tensor.data_ptr() for name, tensor in tensors.items()},
        "gradients": {
            n: (id(t.grad), t.grad.clone().tolist()) for n, t in tensors.items() if t.grad is not None
        },
        "requires_grad": {name: tensor.requires_grad for name, tensor in tensors.items()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "hooks": [len(module._forward_hooks) for module in model.modules()],
        "parameter hooks": [bool(p._backward_hooks) for p in model.parameters()],
    }


def in_use(dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model in the middle of the caller's own work: gradients there, one module in another mode."""
    torch.manual_seed(0)
    model = Tied()
    model.first.weight.grad = torch.randn(5, 5)
    model.norm.eval()
    return model.to(dtype)


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


@pytest.mark.parametrize("budget", ["1GiB", 1400, 1000, 700, 400])
@pytest.mark.parametrize("micro_batch", [2, 20])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_an_attempt_leaves_everything_as_it_was(budget, micro_batch, precision) -> None:
    workload = make_workload(
        model=in_use,
        train_data=points(dtype=torch.float32),
        optimizer=lambda params, lr: torch.optim.AdamW(params, lr=lr),
    )
    model = in_use()
    setup = TrainSetup(
        workload=workload,
        model=model,
        device=CpuDevice(memory_budget=budget),
        worst_case=WorstCaseSampler(workload),
        precision=precision,
        max_grad_norm=1.0,
    )
    before = looks(model)
    state = capture_random_state()
    expected = draws()
    restore_random_state(state)
    outcome = attempt(setup, micro_batch)
    assert outcome.attempt.fits == (budget == "1GiB")
    assert looks(model) == before
    assert draws() == expected
    restore_random_state(state)


def test_a_model_of_16_bit_parameters_comes_back_without_hooks() -> None:
    workload = make_workload(
        model=lambda: nn.Linear(5, 3).bfloat16(),
        train_data=points(dtype=torch.bfloat16),
    )
    model = workload.model()
    setup = TrainSetup(
        workload=workload,
        model=model,
        device=CpuDevice(memory_budget="1GiB"),
        worst_case=WorstCaseSampler(workload),
        precision="fp32",
    )
    before = looks(model)
    for _ in range(3):
        assert attempt(setup, 4).attempt.fits
    assert looks(model) == before
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_what_is_lent_comes_back_after_an_error_too() -> None:
    model = in_use()
    before = looks(model)

    def fail() -> None:
        with temporary_weights(model, CPU) as borrowed:
            borrowed(torch.randn(4, 5)).sum().backward()
            borrowed.eval()
            with torch.no_grad():
                for parameter in borrowed.parameters():
                    parameter.fill_(7.0)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert looks(model) == before


def test_a_buffer_that_a_forward_pass_replaces_comes_back() -> None:
    model = Tied()
    model(torch.randn(4, 5))  # what it registers late is there now, so only "mean" changes
    before = looks(model)
    with temporary_weights(model, CPU) as borrowed:
        borrowed(torch.randn(4, 5))
    assert looks(model) == before


def test_lazy_modules_are_refused_with_what_to_do() -> None:
    refused = pytest.raises(InputError, match=r"lazy modules .* run one forward pass")
    with refused, temporary_weights(nn.LazyLinear(3), CPU):
        pass
