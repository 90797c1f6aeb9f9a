"""Plans for accelerate, against the library itself and the gradient of the whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from autobatch.integrations import accelerate
from tests.support.libraries import installed
from tests.support.training import apart, make_workload, mean_loss, reference, weights


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    yield
    installed("accelerate").state.AcceleratorState._reset_state(reset_partial_state=True)
    installed("accelerate").state.GradientState._reset_state()


def step(accelerator: Any, model: nn.Module, optimizer: Any, loader: Any) -> None:
    """Train one epoch as the library documents it."""
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mean_loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()


def planned(model: nn.Module, loss: Any = mean_loss, *, precision: str = "no", **options: Any) -> Any:
    """Plan for an accelerator; return it with the optimizer, the loader and the plan."""
    accelerator = installed("accelerate").Accelerator(cpu=True, mixed_precision=precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(make_workload().train_data, batch_size=2, num_workers=0)
    plan = accelerate.plan(accelerator, model, optimizer, loader, loss=loss, memory_budget="1GiB", **options)
    return accelerator, optimizer, loader, plan


def test_a_planned_loop_takes_the_step_of_the_whole_batch() -> None:
    workload = make_workload()
    expected, _ = reference(workload, [range(24)], mean_loss)
    torch.manual_seed(0)
    model = workload.model()
    accelerator, optimizer, loader, plan = planned(model, target_batch=24, max_micro_batch=7)
    assert (plan.micro_batches, accelerator.gradient_accumulation_steps) == ([6] * 4, 4)
    assert loader.batch_size == 6
    step(accelerator, model, optimizer, loader)
    assert apart(weights(model), expected) < 1e-12


def test_the_probe_copies_outputs_to_float32_as_the_library_does() -> None:
    """Without the copies the probe would find a larger micro-batch than the loop can run."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 512))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        outputs = model(batch[0].float())
        seen.append(outputs.dtype)
        return outputs.float().square().mean()

    seen: list[torch.dtype] = []
    *_, plan = planned(build(), loss, precision="bf16", target_batch=8, max_micro_batch=4)
    assert plan.precision == "bf16"
    assert set(seen) == {torch.float32}
