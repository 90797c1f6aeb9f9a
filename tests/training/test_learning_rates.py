"""Warm-up and check of the learning rates."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from autobatch.core.errors import InputError, NonFiniteError
from autobatch.training.learning_rates import check_learning_rates, scaled_learning_rate, warmup_factor


def optimizers_at(*rates: float | torch.Tensor) -> tuple[torch.optim.Optimizer, ...]:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    return (optimizer,)


def test_the_factor_grows_to_one() -> None:
    assert [warmup_factor(seen, 40) for seen in (10, 20, 40, 80)] == [0.25, 0.5, 1.0, 1.0]
    assert warmup_factor(1, None) == 1.0


def test_rates_are_scaled_within_the_block_only() -> None:
    optimizers = optimizers_at(0.5, 0.25)
    with scaled_learning_rate(optimizers, 0.5):
        assert [group["lr"] for group in optimizers[0].param_groups] == [0.25, 0.125]
    assert [group["lr"] for group in optimizers[0].param_groups] == [0.5, 0.25]


def test_the_first_rate_is_returned_and_all_are_checked() -> None:
    assert check_learning_rates(optimizers_at(0.5, torch.tensor(0.25)), 1) == 0.5
    with pytest.raises(NonFiniteError, match=r"step 3 is nan \(parameter group 2 of 2\)"):
        check_learning_rates(optimizers_at(0.5, math.nan), 3)
    with pytest.raises(InputError, match=r"is -1"):
        check_learning_rates(optimizers_at(-1.0), 1)
