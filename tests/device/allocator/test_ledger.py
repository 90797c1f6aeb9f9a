"""The allocator that only counts, and CUDA's own words for a refusal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch.core.units import GiB, MiB
from autobatch.device.allocator.ledger import BudgetExceeded, CountingAllocator, cuda_oom_text


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(0, 5000))
def test_live_bytes_are_counted_against_the_limit(sizes, limit):
    ledger = CountingAllocator(limit)
    held = []
    for size in sizes:
        if sum(held) + size > limit:
            with pytest.raises(BudgetExceeded) as refusal:
                ledger.malloc(size)
            assert (refusal.value.requested, refusal.value.free) == (size, limit - sum(held))
        else:
            held.append(ledger.malloc(size))
        assert ledger.allocated_bytes == ledger.peak_allocated_bytes == sum(held)
    assert ledger.reserved_bytes is ledger.peak_reserved_bytes is ledger.retries is None
    for handle in held:
        ledger.free(handle)
    assert ledger.allocated_bytes == 0
    ledger.reset_peak()
    assert ledger.peak_allocated_bytes == 0


def test_the_message_of_a_refusal_is_cudas():
    error = BudgetExceeded(
        requested=2 * GiB - 3, attempted=2 * GiB, allocated=5 * GiB, reserved=6 * GiB, limit=7 * GiB
    )
    text = cuda_oom_text(error, total_bytes=8 * GiB, context_bytes=512 * MiB)
    assert text.startswith(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB of which"
        " 1.50 GiB is free. Including non-PyTorch memory, this process has 6.50 GiB memory in use."
        " 7.00 GiB allowed; Of the allocated memory 5.00 GiB is allocated by PyTorch, and 1024.00 MiB"
        " is reserved by PyTorch but"
        " unallocated. If reserved but unallocated memory is large try setting"
    )
    assert "allowed;" not in cuda_oom_text(error, total_bytes=7 * GiB)


def test_a_refusal_counts_the_cache_against_the_limit():
    plain = BudgetExceeded(requested=3, attempted=3, allocated=8, reserved=None, limit=10)
    cached = BudgetExceeded(requested=3, attempted=5, allocated=4, reserved=9, limit=10)
    assert (plain.free, cached.free) == (2, 1)
    assert str(cached) == "5 bytes do not fit in the 1 free of 10"


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (1024, "1024 bytes"), (1025, "1.00 KiB"), (MiB, "1024.00 KiB"), (3 * GiB, "3.00 GiB")],
)
def test_sizes_are_written_like_cudas(size, text):
    error = BudgetExceeded(requested=size, attempted=size, allocated=0, reserved=0, limit=GiB)
    assert f"Tried to allocate {text}. " in cuda_oom_text(error, total_bytes=GiB)
