"""The way back to the start of a batch: gradients, buffers and draws, and a device that is lost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autobatch.device.cpu import CpuDevice
from autobatch.training.undo import undo_batch
from autobatch.workload.rng import capture_random_state
from tests.support.steps import train_state_of
from tests.support.training import make_workload


class Lost(CpuDevice):
    """A device that no longer answers. Freeing its cache does not show it."""

    def synchronize(self) -> None:
        raise RuntimeError("lost")


def test_gradients_buffers_and_draws_are_those_of_the_start() -> None:
    norm = nn.BatchNorm1d(5, dtype=torch.float64)
    state = train_state_of(make_workload(model=lambda: nn.Sequential(norm, nn.Linear(5, 3).double())))
    before = capture_random_state()
    drawn = torch.rand(3)
    state.buffers.take()
    state.model(torch.randn(4, 5).double()).sum().backward()
    assert norm.num_batches_tracked == 1
    assert undo_batch(state, CpuDevice(memory_budget="1GiB"), before, is_fatal=False)
    assert norm.num_batches_tracked == 0
    assert all(parameter.grad is None for parameter in state.model.parameters())
    assert torch.equal(torch.rand(3), drawn)


def test_a_lost_device_is_an_error_unless_it_was_fatal_already() -> None:
    state = train_state_of(make_workload())
    before, device = capture_random_state(), Lost(memory_budget="1GiB")
    assert not undo_batch(state, device, before, is_fatal=True)
    with pytest.raises(RuntimeError, match="lost"):
        undo_batch(state, device, before, is_fatal=False)


def test_the_graphs_of_a_batch_that_ran_out_of_memory_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    resets: list[str] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append("reset"))
    state = train_state_of(make_workload())
    for has_graphs in (False, True):
        state.gradients.are_overwritten = has_graphs
        assert undo_batch(state, CpuDevice(memory_budget="1GiB"), capture_random_state(), is_fatal=False)
    assert resets == ["reset"]
