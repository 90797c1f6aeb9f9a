"""Nothing within a step waits for the device before the last backward."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autobatch import Loss
from autobatch.step.train_step import accumulate, finish
from tests.support.kernels import needs_kernels
from tests.support.training import make_workload, mean_loss, network, points, train_state_of

READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default}


class Reads(TorchDispatchMode):
    """Dispatch mode that counts the values that leave the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in READS
        return func(*args, **(kwargs or {}))


def counted(model: nn.Module, batch: Any) -> Loss:
    return Loss(mean_loss(model, batch) * 12, (batch[1] >= 0).sum())


def step_on(device: torch.device, loss: Any, precision: Any) -> tuple[Any, list[tuple[Any, int]]]:
    """Return a train state and the micro-batches of a step."""
    model = lambda: nn.Sequential(nn.BatchNorm1d(5), network(torch.float32)).to(device)  # noqa: E731
    workload = make_workload(model=model, loss=loss)
    state = train_state_of(workload, device=device, precision=precision, max_grad_norm=1.0, ema=0.9)
    columns = [column.to(device).split(4) for column in points(12, dtype=torch.float32).columns]
    return state, [(batch, 4) for batch in zip(*columns, strict=True)]


KINDS = pytest.mark.parametrize("loss", [mean_loss, pytest.param(counted, marks=needs_kernels)])
PRECISIONS = pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])


@KINDS
@PRECISIONS
def test_no_value_leaves_the_device_during_accumulation(loss, precision) -> None:
    state, batches = step_on(torch.device("cpu"), loss, precision)
    for _ in range(3):
        with Reads() as reads:
            accumulator = accumulate(state, batches, 12)
        assert reads.count == 0
        assert finish(state, accumulator).count == 12


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@KINDS
@PRECISIONS
def test_torch_sees_no_synchronisation_on_a_gpu(loss, precision) -> None:
    state, batches = step_on(torch.device("cuda", 0), loss, precision)
    finish(state, accumulate(state, batches, 12))
    # The first switch warns that the mode is a prototype, after it was set (torch/csrc/cuda/Module.cpp).
    with warnings.catch_warnings(action="ignore"):
        torch.cuda.set_sync_debug_mode("error")
    try:
        accumulator = accumulate(state, batches, 12)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert finish(state, accumulator).count == 12
