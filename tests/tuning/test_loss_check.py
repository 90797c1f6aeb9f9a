"""Checks of a configuration's first losses against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autobatch.setup.setup import with_knobs
from autobatch.tuning.configuration import LOSS
from autobatch.tuning.loss_check import LossCheck
from tests.support.training import mean_loss
from tests.support.trials import changed, make_runner, trial_setup


def test_losses_far_from_the_reference_are_infeasible() -> None:
    def spoiled(model: nn.Module, batch: Any) -> torch.Tensor:
        factor = 1.5 if torch.is_autocast_enabled("cpu") else 1.0
        return mean_loss(model, batch) * factor

    found = make_runner(trial_setup(loss=spoiled)).measure(changed(precision="bf16"))
    assert (found.failure or "").startswith("its losses differ from the reference")
    assert found.constraints[LOSS] == pytest.approx(0.48, abs=0.1)


def test_a_non_finite_loss_is_infeasible() -> None:
    def nan(model: nn.Module, batch: Any) -> torch.Tensor:
        return mean_loss(model, batch) * (float("nan") if torch.is_autocast_enabled("cpu") else 1.0)

    found = make_runner(trial_setup(loss=nan)).measure(changed(precision="bf16"))
    assert found.constraints == {LOSS: 1.0}


def test_the_noise_of_a_random_model_is_tolerated() -> None:
    def noisy(model: nn.Module, batch: Any) -> torch.Tensor:
        return mean_loss(model, batch) * (1 + torch.rand(()))

    made = trial_setup(loss=noisy)
    check = LossCheck(made, 8)
    assert check.over(with_knobs(made, changed(checkpointing="full"))) < 0
    assert check._noise > 0.02


def test_bf16_trains_as_fp32_does() -> None:
    assert make_runner(trial_setup()).measure(changed(precision="bf16")).feasible
