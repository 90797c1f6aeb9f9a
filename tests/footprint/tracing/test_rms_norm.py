"""RMS norm as CUDA runs it: one kernel, which keeps its input and a number per row."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.device.allocator.tracker import StorageMeter
from autobatch.footprint.tracing.cuda_policy import _rms_norm as rms_norm
from autobatch.footprint.tracing.cuda_policy import cuda_policy


def kept_bytes(run) -> int:
    """Return what a forward pass holds until its backward pass, without its result."""
    x = torch.randn(6, 10, requires_grad=True)
    weight = torch.ones(10, requires_grad=True)
    with cuda_policy((8, 0)), StorageMeter(CountingAllocator()) as meter:
        out = run(x, weight)
        held = meter.allocator.allocated_bytes - out.untyped_storage().nbytes()
        out.sum().backward()
    assert x.grad.shape == x.shape
    assert weight.grad.shape == weight.shape
    return held


def test_it_keeps_a_number_per_row():
    assert kept_bytes(lambda x, weight: functional.rms_norm(x, (10,), weight)) == 6 * 4


def test_rows_may_have_several_dimensions_and_no_weight():
    x = torch.randn(3, 4, 5, requires_grad=True)
    out = rms_norm(x, (4, 5))
    out.sum().backward()
    assert out.shape == x.grad.shape == x.shape


@pytest.mark.parametrize("eps", [None, 1e-3])
def test_unlike_types_run_the_operators_that_torch_runs(eps):
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    weight = torch.rand(8)
    ours = rms_norm(x, (8,), weight, eps)
    least = torch.finfo(torch.float32).eps if eps is None else eps
    theirs = functional.rms_norm(x.float(), (8,), weight, least)
    assert torch.allclose(ours.float(), theirs, atol=0.02)
