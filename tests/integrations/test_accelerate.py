"""Plans for accelerate, against the library itself and the gradient of the whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from autobatch import InputError, integrations
from tests.support.libraries import installed
from tests.support.training import apart, make_workload, mean_loss, reference, weights

accelerate = integrations.accelerate


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
    model, calls = workload.model(), Counting()
    accelerator, optimizer, loader, plan = planned(model, calls, target_batch=24, max_micro_batch=7)
    assert calls.calls == 0, "what the probe did is undone"
    assert (plan.micro_batches, accelerator.gradient_accumulation_steps) == ([6] * 4, 4)
    assert plan.loader.batch_size == 6
    assert plan.loader.dataset is loader.dataset
    step(accelerator, model, optimizer, plan.loader)
    assert apart(weights(model), expected) < 1e-12


class Counting:
    """A loss that counts its calls."""

    calls = 0

    def __call__(self, model: Any, batch: Any) -> torch.Tensor:
        self.calls += 1
        return mean_loss(model, batch)


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


def prepared(micro_batch: int, *, own: bool = False) -> tuple[Any, Any, Any, Any]:
    """Plan for batches of 24, and prepare what the loop needs, with the user's own loader or the plan's."""
    installed("accelerate").state.AcceleratorState._reset_state(reset_partial_state=True)
    installed("accelerate").state.GradientState._reset_state()
    accelerator = installed("accelerate").Accelerator(cpu=True)
    workload = make_workload()
    model = workload.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader([*workload.train_data] * 5, batch_size=2)
    plan = accelerate.plan(
        accelerator, model, optimizer, loader, loss=mean_loss, target_batch=24, max_micro_batch=micro_batch
    )
    return accelerator, *accelerator.prepare(model, optimizer, loader if own else plan.loader)


def samples_of_steps(made: tuple[Any, Any, Any, Any], batches: int) -> list[int]:
    """Train on some batches, and count the samples of each step; those of a step that has not ended too."""
    accelerator, model, optimizer, loader = made
    counts = [0]
    for _, batch in zip(range(batches), loader, strict=False):
        with accelerator.accumulate(model):
            accelerator.backward(mean_loss(model, batch))
            counts[-1] += len(batch[0])
            optimizer.step()
            optimizer.zero_grad()
            counts += [0] * accelerator.sync_gradients
    return counts


def test_a_loop_resumed_with_another_micro_batch_takes_whole_steps(tmp_path: Path) -> None:
    """After three steps of one micro-batch, the fourth is not the end of a step of four."""
    made = prepared(24)
    assert samples_of_steps(made, 3) == [24, 24, 24, 0]
    made[0].save_state(str(tmp_path))
    resumed = prepared(6)
    resumed[0].load_state(str(tmp_path))
    assert samples_of_steps(resumed, 8) == [24, 24, 0]


def test_a_loader_of_another_size_is_not_prepared() -> None:
    with pytest.raises(InputError, match=r"micro-batches of 6 samples.* batches of 2: give plan\.loader"):
        prepared(6, own=True)
