"""A plan as arguments of accelerate, checked against the library if it is installed."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from torch.utils.data import DataLoader

from autobatch.integrations import accelerate
from tests.support.custom_loops import small_plan
from tests.support.libraries import imports_library, installed
from tests.support.training import apart, make_workload, mean_loss, reference, weights


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_arguments_follow_the_plan(precision: str) -> None:
    plan = small_plan(24, 7, precision=precision)
    assert accelerate.arguments(plan) == {
        "gradient_accumulation_steps": 4,
        "mixed_precision": {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}[precision],
    }
    assert accelerate.batch_size(plan) == 6


def test_the_library_takes_every_argument() -> None:
    known = inspect.signature(installed("accelerate").Accelerator).parameters
    assert set(accelerate.arguments(small_plan(24, 7))) <= set(known)


def test_the_adapter_does_not_import_the_library() -> None:
    assert not imports_library(accelerate, "accelerate")


def test_the_library_takes_the_step_of_the_plan() -> None:
    """Equal micro-batches of a mean over samples: what the adapter promises, in float64."""
    workload = make_workload()
    expected, _ = reference(workload, [range(24)], mean_loss)
    library = installed("accelerate")
    plan = small_plan(24, 7)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelerator = library.Accelerator(cpu=True, **accelerate.arguments(plan))
        model, optimizer, loader = accelerator.prepare(
            module := workload.model(),
            torch.optim.SGD(module.parameters(), lr=plan.learning_rate),
            DataLoader(workload.train_data, batch_size=accelerate.batch_size(plan)),
        )
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(mean_loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
    assert apart(weights(module), expected) < 1e-12
