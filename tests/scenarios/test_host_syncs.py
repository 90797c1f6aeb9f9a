"""Nothing within a step waits for the device before the last backward."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autobatch import Loss
from autobatch.step.train_state import StepSettings, build_train_state
from autobatch.step.train_step import accumulate, finish
from tests.support.kernels import needs_kernels
from tests.support.training import make_workload

READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default}


class Reads(TorchDispatchMode):
    """Dispatch mode that counts the values that leave the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in READS
        return func(*args, **(kwargs or {}))


def mean(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def counted(model: nn.Module, batch: Any) -> Loss:
    return Loss(nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum"), (batch[1] > -9).sum())


def step_on(device: torch.device, loss: Any, precision: Any) -> tuple[Any, list[tuple[Any, int]]]:
    """Return a train state and the micro-batches of a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).to(device)
    settings = StepSettings(precision=precision, max_grad_norm=1.0, ema=0.9)
    state = build_train_state(make_workload(loss=loss), model, device, settings, learning_rate=0.01)
    return state, [
        ((torch.randn(4, 3, device=device), torch.randn(4, 1, device=device)), 4) for _ in range(3)
    ]


KINDS = pytest.mark.parametrize("loss", [mean, pytest.param(counted, marks=needs_kernels)])
PRECISIONS = pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])


@KINDS
@PRECISIONS
def test_no_value_leaves_the_device_during_accumulation(loss, precision) -> None:
    state, batches = step_on(torch.device("cpu"), loss, precision)
    for step in range(3):
        with Reads() as reads:
            accumulator = accumulate(state, batches, 12, lambda _: None)
        # The count of a Loss is read once in a run, to choose a divisor.
        assert reads.count == (step == 0 and loss is counted)
        assert finish(state, accumulator, mark=lambda _: None).count == 12


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@KINDS
@PRECISIONS
def test_torch_sees_no_synchronisation_on_a_gpu(loss, precision) -> None:
    state, batches = step_on(torch.device("cuda", 0), loss, precision)
    finish(state, accumulate(state, batches, 12, lambda _: None), mark=lambda _: None)
    # The first switch warns that the mode is a prototype, after it was set (torch/csrc/cuda/Module.cpp).
    with warnings.catch_warnings(action="ignore"):
        torch.cuda.set_sync_debug_mode("error")
    try:
        accumulator = accumulate(state, batches, 12, lambda _: None)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert finish(state, accumulator, mark=lambda _: None).count == 12
