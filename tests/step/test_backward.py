"""The backward pass of a loss against that of torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autobatch.step.backward import backward_from


def gradients_of(run) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    for _ in range(3):
        run(model(torch.randn(4, 5)).square().mean())
    return [parameter.grad for parameter in model.parameters()]


def test_gradients_are_those_of_the_scaled_loss():
    expected = gradients_of(lambda loss: (loss * 0.25).backward())
    for found, wanted in zip(gradients_of(lambda loss: backward_from(loss, 0.25)), expected, strict=True):
        assert torch.equal(found, wanted)


def test_the_weight_is_no_memory_of_a_gradient():
    """The gradient of a sum over one element may keep the memory of the weight that it began with."""
    weight = nn.Parameter(torch.ones(1))
    for _ in range(3):
        backward_from(weight.sum(), 0.5)
    assert weight.grad.tolist() == [1.5]


def test_a_tensor_of_another_class_goes_its_own_way():
    class Noted(Tensor):
        backwards: list[float] = []

        def backward(self, gradient: Tensor) -> None:
            self.backwards.append(gradient.item())

    backward_from(torch.ones(()).requires_grad_().as_subclass(Noted), 2.0)
    assert Noted.backwards == [2.0]


def test_an_error_of_the_backward_pass_passes():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise KeyError("backward")

    with pytest.raises(KeyError, match="backward"):
        backward_from(Fails.apply(torch.ones((), requires_grad=True)), 1.0)
