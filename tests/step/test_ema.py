"""The average of the weights: its precision, and the weights that return after it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import pytest
import torch
from torch import nn

from autobatch.step.train_state import WeightAverage
from tests.support.training import averages, network, weights


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_steps_too_small_for_16_bits_are_not_lost(dtype: torch.dtype) -> None:
    """The average moves from 1 towards 2 by a thousandth per step. In bf16 it would stay at 1."""
    parameter = nn.Parameter(torch.ones(3, dtype=dtype))
    average = WeightAverage([parameter], 0.999)
    parameter.data.fill_(2.0)
    for _ in range(100):
        average.update()
    (found,) = averages(average)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    assert found.tolist() == pytest.approx([2.0 - 0.999**100] * 3, rel=1e-5)


def test_a_parameter_unfrozen_later_is_averaged_from_then_on() -> None:
    frozen, free = nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.zeros(2))
    average = WeightAverage([frozen, free], 0.5)
    average.update()
    assert averages(average)[0].tolist() == [1.0, 1.0]
    frozen.requires_grad_()
    for value in (3.0, 6.0):
        frozen.data.fill_(value)
        average.update()
    assert averages(average)[0].tolist() == [4.0, 4.0]
    other = WeightAverage([nn.Parameter(torch.ones(2), requires_grad=False), free], 0.5)
    other.load_state_dict(average.state_dict())
    assert [tensor.tolist() for tensor in averages(other)] == [[4.0, 4.0], [0.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_averages_replace_the_weights_for_a_while(dtype: torch.dtype) -> None:
    model = network(dtype)
    average = WeightAverage(list(model.parameters()), 0.9)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter))
    average.update()
    before, kept = weights(model), flat(averages(average))
    with suppress(KeyError), average.swapped_in():
        assert torch.equal(weights(model), flat(tensor.to(dtype) for tensor in averages(average)))
        assert not torch.equal(weights(model), before)
        raise KeyError
    assert torch.equal(weights(model), before)
    assert torch.equal(flat(averages(average)), kept)
