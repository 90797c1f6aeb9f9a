"""Figures that the host reads at once, and the same figures as a device would compute them."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autobatch.step.gradients import norm_of
from autobatch.step.readable import is_readable
from autobatch.step.train_state import StepSettings, build_train_state
from autobatch.step.train_step import train_step
from tests.support.training import make_workload, network, points


class Counting(TorchDispatchMode):
    """A mode in which every operator runs as it is."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_nothing_is_read_that_is_counted_or_of_another_kind() -> None:
    figure = torch.ones(())
    assert is_readable(figure)
    assert not is_readable(torch.ones((), device="meta"))
    assert not is_readable(torch.nn.Parameter(figure))
    with Counting():
        assert not is_readable(figure)


def test_a_norm_that_is_read_is_that_which_a_device_computes() -> None:
    gradients = [torch.randn(5, 3), torch.randn(7), torch.randn(2).double(), torch.randn(4).bfloat16()]
    with Counting():
        computed = norm_of(gradients)
    assert isinstance(computed, Tensor)
    read = norm_of(gradients)
    assert isinstance(read, float)
    assert read == pytest.approx(float(computed), rel=1e-6)


def test_a_step_has_one_result_on_both_ways() -> None:
    results = []
    inputs, labels = points(8, dtype=torch.float32).columns
    parts = [((inputs[:5], labels[:5]), 5), ((inputs[5:], labels[5:]), 3)]
    for mode in (nullcontext(), Counting()):
        torch.manual_seed(0)
        model = network(torch.float32)
        state = build_train_state(
            make_workload(), model, torch.device("cpu"), StepSettings(precision="fp32"), learning_rate=0.1
        )
        with mode:
            result = train_step(state, parts, 8)
        results.append((result, [p.detach().clone() for p in model.parameters()]))
    (read, own), (computed, others) = results
    assert read.loss == pytest.approx(computed.loss, rel=1e-6)
    assert read.grad_norm == pytest.approx(computed.grad_norm, rel=1e-6)
    assert read.first_norm == pytest.approx(computed.first_norm, rel=1e-6)
    assert all(torch.equal(one, other) for one, other in zip(own, others, strict=True))
