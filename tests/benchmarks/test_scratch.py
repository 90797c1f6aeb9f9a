"""A GPU made of arithmetic: its scratch follows the rules, and its limits are found."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autobatch.core.units import MiB
from autobatch.device.allocator.caching import CachingAllocator
from autobatch.device.allocator.trace import replay
from autobatch.footprint.tracing.trace_step import Setting
from benchmarks.probe import scratch
from benchmarks.probe.libraries import (
    WORKSPACE,
    Libraries,
    SimulatedGpu,
    both_orders,
    convolution_bytes,
    reduction_bytes,
)
from tests.support.probes import work


class Small(nn.Module):
    """An embedding, a convolution and products."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.mix = nn.Embedding(500, 16), nn.Conv1d(16, 16, 3)
        self.head = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.mix(self.rows(ids).transpose(1, 2)).mean(dim=2))


@pytest.fixture(scope="module")
def orders():
    samples = [(torch.arange(40) % 500, torch.tensor(number % 4)) for number in range(8)]
    given = work(Small, train_data=samples)
    setting = Setting(
        workload=given,
        model=Small(),
        batch_of=lambda m: (samples[0][0].expand(m, -1).contiguous(), torch.arange(m) % 4),
        precision="fp32",
        capability=(9, 0),
    )
    return both_orders(setting)


def test_scratch_appears_past_a_size() -> None:
    assert reduction_bytes(64, 100, 4) == []
    assert len(reduction_bytes(64, 10**6, 4)) == 2
    assert [convolution_bytes(2, 100 * m, m) for m in (23, 24)] == [0, 600]
    assert convolution_bytes(0, 100, 50) == 0


@pytest.mark.parametrize("lasting", [True, False])
def test_workspaces_last_or_are_taken_at_each_product(orders, lasting: bool) -> None:
    trace = orders[0].at(60, Libraries(lasting_workspaces=lasting))
    taken = [size for _, size in trace.events].count(WORKSPACE)
    held = replay(trace, CachingAllocator()).allocated_bytes
    assert taken == 2 if lasting else taken > 10
    assert (held >= 2 * WORKSPACE) is lasting


def test_indices_are_sorted_above_a_number(orders) -> None:
    few, many = (len(orders[0].at(m, Libraries()).events) for m in (76, 77))
    assert many > few, "77 × 40 indices are the first over 3,072"


@pytest.mark.parametrize("lasting", [True, False])
def test_a_limit_is_found_in_few_runs(orders, lasting: bool) -> None:
    gpu = SimulatedGpu(orders, 200 * MiB, Libraries(lasting_workspaces=lasting))
    row = scratch.measure(gpu)
    assert row["exact"]
    assert row["runs"] <= 5
    assert row["ooms"] <= 1
