"""Opening a setup: device, budget, precision and model, its description, and the key of its limit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autobatch import InputError, Workload
from autobatch.core.options import Options
from autobatch.rehearsal.setup import Setup, describe_setup, open_setup
from tests.support.probes import WIDTH, mlp, vectors, work
from tests.support.training import INFO_NCE, amsgrad, make_workload, token_loss


def opened(workload: Workload | None = None, world: int = 1, **options: Any) -> Setup:
    asked = Options(**{"device": "cpu", "memory_budget": "1MiB", **options})
    return open_setup(workload or work(), asked, world)


def key_of(workload: Workload | None = None, world: int = 1, **options: Any) -> dict[str, Any]:
    return describe_setup(opened(workload, world, **options)).key


class Renamed(nn.Sequential):
    """The same parameters in another class."""


def with_a_frozen_layer() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


def needing_the_model(parameters, learning_rate: float) -> torch.optim.Optimizer:
    raise KeyError("head")


@pytest.mark.parametrize(
    ("field", "workload", "options"),
    [
        ("model", work(lambda: mlp(65)), {}),
        ("model", work(with_a_frozen_layer), {}),
        ("model", work(lambda: Renamed(*mlp())), {}),
        ("optimizer", work(optimizer=amsgrad), {}),
        ("optimizer", work(optimizer=needing_the_model), {}),
        ("optimizer", work(optimizer=lambda p, lr: torch.optim.AdamW(p, lr=lr, foreach=False)), {}),
        ("samples", work(train_data=vectors(width=WIDTH + 1)), {}),
        ("loss", work(loss=token_loss), {}),
        ("--precision", work(), {"precision": "bf16"}),
        ("budget_bytes", work(), {"memory_budget": "2MiB"}),
        ("ema", work(), {"ema": 0.9}),
        ("keeps_batches", work(), {"command": "plan"}),
        ("number of ranks", work(), {"world": 2}),
    ],
)
def test_everything_that_changes_the_limit_changes_one_field_of_the_key(
    field: str, workload: Workload, options: dict[str, Any]
) -> None:
    before, after = key_of(), key_of(workload, **options)
    assert {name for name in before if before[name] != after[name]} == {field}


def test_ranks_refuse_a_loss_over_the_batch_before_a_probe() -> None:
    with pytest.raises(InputError, match="a WholeBatchLoss trains in one process, and each of 2 ranks"):
        opened(make_workload(loss=INFO_NCE), 2)


def test_a_model_that_is_in_eval_mode_as_a_whole_is_put_in_train_mode() -> None:
    """As a library loads one."""
    model = opened(work(lambda: mlp().eval())).model
    assert all(module.training for module in model.modules())
