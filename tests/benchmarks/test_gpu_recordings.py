"""Recordings of real GPUs, replayed through the model of the allocator."""

from __future__ import annotations

from pathlib import Path

import pytest

from autobatch.device.allocator.caching import CachingAllocator
from autobatch.device.allocator.trace import Trace, replay
from benchmarks.gpu.keep import read_golden, read_traces
from benchmarks.gpu.recordings import mismatches

FIXTURES = Path(__file__).parents[1] / "fixtures" / "gpu"
GOLDEN = sorted(FIXTURES.glob("*_golden.json.gz"))
TRACES = sorted(FIXTURES.glob("*_traces.jsonl.gz"))


@pytest.mark.parametrize("file", GOLDEN, ids=lambda file: file.name)
def test_the_model_reserves_what_the_gpu_reserved(file):
    assert mismatches(read_golden(file)) == []


@pytest.mark.parametrize("file", TRACES, ids=lambda file: file.name)
def test_a_larger_micro_batch_needs_more_memory(file):
    for traced in read_traces(file).values():
        peaks = [
            replay(Trace(tuple(traced[size])), CachingAllocator()).peak_allocated_bytes
            for size in sorted(traced)
        ]
        assert peaks == sorted(peaks)
