"""Choices of the tuner that users have reported: numbers that nobody asked to change stay."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import autobatch
from tests.support.probes import work

INPUTS = torch.linspace(-1, 1, 32).view(2, 16)
TARGETS = torch.tensor([[0.3], [0.7]])
RATE, STEPS = 0.1, 3
OPTIONS: dict[str, Any] = {
    "target_batch": 2,
    "max_micro_batch": 1,
    "device": "cpu",
    "memory_budget": "64MiB",
    "trials": 4,
}
SLOWDOWN = 4
"""Time of a forward pass in fp32 ÷ that in bf16."""


class FastInBf16(nn.Module):
    """Model whose forward pass takes a quarter of the time in bf16: it sleeps instead of computing."""

    def __init__(self, layer: Callable[[], nn.Linear]) -> None:
        super().__init__()
        self.layer = layer()

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(0.002 if torch.is_autocast_enabled("cpu") else 0.002 * SLOWDOWN)
        return self.layer(inputs)


def layer() -> nn.Linear:
    made = nn.Linear(16, 1)
    with torch.no_grad():
        made.weight.copy_(torch.linspace(-0.5, 0.5, 16).view(1, 16))
        made.bias.zero_()
    return made


def workload() -> autobatch.Workload:
    return work(
        lambda: FastInBf16(layer),
        train_data=TensorDataset(INPUTS, TARGETS),
        loss=lambda model, batch: mse_loss(model(batch[0]), batch[1]),
        optimizer=lambda params, rate: torch.optim.SGD(params, lr=rate, foreach=False),
        learning_rate=RATE,
    )


@pytest.fixture
def native_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processor have units for bf16."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})


@pytest.mark.program
@pytest.mark.usefixtures("native_bf16")
def test_a_tuned_run_is_in_fp32_and_offers_what_is_faster_by_the_lower_bound_of_its_interval(
    tmp_path: Path,
) -> None:
    found = autobatch.fit(workload(), steps=STEPS, out=tmp_path / "run", **OPTIONS)
    expected = layer().double()
    optimizer = torch.optim.SGD(expected.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        mse_loss(expected(INPUTS.double()), TARGETS.double()).backward()
        optimizer.step()
    weight = found.model.layer.weight.detach()
    assert weight.dtype is torch.float32
    assert float((weight - expected.weight.detach()).abs().max()) < 1e-6
    (offer,) = found.tuning.offers
    (said,) = map(float, re.findall(r"([0-9.]+) ×", offer))
    assert "add --precision bf16" in offer
    assert offer in str(found)
    # A sleep takes longer than asked, the shorter one relatively more, so that the true ratio is below that.
    assert 1 < said < SLOWDOWN


@pytest.mark.parametrize(("asked", "expected"), [({}, "fp32"), ({"precision": "bf16"}, "bf16")])
def test_the_precision_on_a_gpu_is_fp32_unless_another_is_asked_for(
    asked: dict[str, Any], expected: str
) -> None:
    gpu = {"target_batch": 2, "max_micro_batch": 1, "device": "sim:h100-80gb"}
    assert autobatch.plan(workload(), **gpu, **asked).precision == expected
