"""Readings of a session on a GPU, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from autobatch.core.units import GiB
from autobatch.device.allocator.ledger import MemoryStats
from autobatch.device.cuda_allocator import CudaMeter, why_refused
from tests.support.fake_cuda import FakeCuda


def stats(*, retries: int | None = 0, reserved: int | None = 0) -> MemoryStats:
    return MemoryStats(
        allocated_bytes=0,
        reserved_bytes=reserved,
        peak_allocated_bytes=0,
        peak_reserved_bytes=reserved,
        retries=retries,
    )


def test_retries_and_reserved_bytes_over_the_budget_are_refused() -> None:
    assert why_refused(stats(reserved=GiB), GiB) is None
    assert why_refused(stats(reserved=None, retries=None), GiB) is None
    assert "freed its cache 2 times" in (why_refused(stats(retries=2), GiB) or "")
    over = why_refused(stats(reserved=2 * GiB), GiB)
    assert over == "the allocator held 2.00 GiB, over the budget of 1.00 GiB"


def test_a_meter_counts_the_retries_of_its_own_session(fake: FakeCuda) -> None:
    meter = CudaMeter(0)
    meter.count([torch.zeros(1)])
    assert meter.trace() is None
    read = meter.stats()
    assert read == MemoryStats(1, 2 * GiB, 3, 4 * GiB, 0)
    assert why_refused(read, 6 * GiB) is None
    fake.figures["num_alloc_retries"] = 9
    assert why_refused(meter.stats(), 6 * GiB) == "the allocator freed its cache 2 times to find memory"


def test_only_a_probe_waits_for_the_gpu(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    CudaMeter(0).stats()
    assert not waits
    CudaMeter(0, history=object()).stats()  # type: ignore[arg-type]
    assert waits == [0]
