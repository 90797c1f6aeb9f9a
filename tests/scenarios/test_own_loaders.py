"""Whole runs on a user's own loader, against the same batches trained by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import autobatch
from autobatch.core.errors import InputError
from autobatch.workload.sampler_order import SamplerOrder
from tests.support.libraries import installed

SAMPLES = 20
DRAW = torch.Generator().manual_seed(5)
DATA = TensorDataset(
    torch.randn(SAMPLES, 3, generator=DRAW, dtype=torch.float64),
    torch.randn(SAMPLES, generator=DRAW, dtype=torch.float64),
)
OPTIONS: dict[str, Any] = {"target_batch": 6, "device": "cpu", "trials": 0, "precision": "fp32"}


def build() -> nn.Module:
    return nn.Linear(3, 1, dtype=torch.float64)


def squares(model: nn.Module, batch: Any) -> torch.Tensor:
    return ((model(batch[0])[:, 0] - batch[1]) ** 2).mean()


def sgd(params: Any, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=learning_rate)


def weighted(*weights: float, workers: int = 0) -> autobatch.Workload:
    sampler = WeightedRandomSampler(weights * (SAMPLES // len(weights)), 15)
    loader = DataLoader(DATA, batch_size=4, sampler=sampler, num_workers=workers)
    return autobatch.Workload.from_loader(
        loader, model=build, loss=squares, optimizer=sgd, learning_rate=0.05
    )


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOBATCH_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("workers", [0, 1])
def test_the_batches_are_those_of_the_sampler(tmp_path: Path, workers: int) -> None:
    workload = weighted(1.0, 9.0, workers=workers)
    result = autobatch.fit(workload, steps=5, out=tmp_path / "run", max_micro_batch=4, seed=3, **OPTIONS)
    order = SamplerOrder(workload.sampler or (), SAMPLES, 3)
    drawn = [*order(0), *order(1)]
    torch.manual_seed(3)
    model = build()
    optimizer = sgd(model.parameters(), 0.05)
    for step in range(5):
        ids = drawn[6 * step : 6 * step + 6]
        optimizer.zero_grad()
        squares(model, [tensor[ids] for tensor in DATA.tensors]).backward()
        optimizer.step()
    assert result.plan is not None
    assert result.plan.accumulation_steps == 2
    assert torch.allclose(weights_of(result.model), weights_of(model), rtol=1e-12)


def test_a_resumed_run_goes_on_with_the_same_samples(tmp_path: Path) -> None:
    whole = autobatch.fit(weighted(1.0, 9.0), steps=6, out=tmp_path / "whole", **OPTIONS)
    autobatch.fit(weighted(1.0, 9.0), steps=3, out=tmp_path / "parts", **OPTIONS)
    parts = autobatch.fit(weighted(1.0, 9.0), steps=6, out=tmp_path / "parts", resume=True, **OPTIONS)
    assert torch.equal(weights_of(parts.model), weights_of(whole.model))


def test_a_resume_with_another_sampler_is_refused(tmp_path: Path) -> None:
    autobatch.fit(weighted(1.0, 9.0), steps=1, out=tmp_path / "run", **OPTIONS)
    with pytest.raises(InputError, match="the sampler draws another order than at the checkpoint"):
        autobatch.fit(weighted(9.0, 1.0), steps=2, out=tmp_path / "run", resume=True, **OPTIONS)


def test_the_averaged_weights_of_a_schedule_free_optimizer_are_validated_and_exported(
    tmp_path: Path,
) -> None:
    """The oracle trains by hand as the library documents it: train() around steps, eval() after them."""
    library = installed("schedulefree")

    def optimizer(params: Any, learning_rate: float) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = library.SGDScheduleFree(params, lr=learning_rate)
        return made

    workload = autobatch.Workload(
        model=build,
        train_data=DATA,
        sampler=range(SAMPLES),
        validation_data=DATA,
        loss=squares,
        optimizer=optimizer,
        learning_rate=0.1,
    )
    result = autobatch.fit(
        workload, steps=6, out=tmp_path / "run", max_micro_batch=4, validate_every=2, **OPTIONS
    )
    torch.manual_seed(0)
    model = build()
    made: Any = optimizer(model.parameters(), 0.1)
    made.train()
    for step in range(6):
        ids = [(6 * step + place) % SAMPLES for place in range(6)]
        made.zero_grad()
        squares(model, [tensor[ids] for tensor in DATA.tensors]).backward()
        made.step()
    trained = weights_of(model).clone()
    made.eval()
    assert not torch.allclose(trained, weights_of(model))
    assert torch.allclose(weights_of(result.model), weights_of(model), rtol=1e-12)
    exported = load_file(tmp_path / "run" / "model.safetensors")
    assert torch.allclose(exported["weight"], model.weight, rtol=1e-12)
    assert result.training is not None
    expected = float(squares(model, DATA.tensors).detach())
    assert result.training.validation["loss"] == pytest.approx(expected, rel=1e-12)
    parts = {"out": tmp_path / "parts", "max_micro_batch": 4, **OPTIONS}
    autobatch.fit(workload, steps=4, **parts)
    assert torch.equal(
        weights_of(autobatch.fit(workload, steps=6, resume=True, **parts).model), weights_of(result.model)
    )
