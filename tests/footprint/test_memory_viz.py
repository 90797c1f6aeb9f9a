"""Snapshots of a step, against torch's own reader and against the replay."""

from __future__ import annotations

import pickle
import pickletools

import pytest
import torch.cuda._memory_viz as torch_viz

from autobatch.device.allocator.caching import AllocatorConfig, CachingAllocator
from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.device.allocator.trace import replay
from autobatch.footprint.memory_viz import dump, snapshot
from autobatch.footprint.predict import footprint
from tests.support.step_workloads import WORKLOADS, setting, setup

# The opcodes that torch/utils/viz/MemoryViz.js reads.
OPCODES = {
    *("APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINPUT", "BINUNICODE"),
    *("DICT", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "LIST", "LONG1", "LONG_BINGET"),
    *("LONG_BINPUT", "MARK", "MEMOIZE", "NEWFALSE", "NEWTRUE", "NONE", "PROTO", "SETITEM", "SETITEMS"),
    *("SHORT_BINUNICODE", "STOP", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
}
ALLOCATORS = {
    "counting": CountingAllocator,
    "caching": CachingAllocator,
    "expandable": lambda: CachingAllocator(None, AllocatorConfig(expandable_segments=True)),
}


@pytest.fixture(scope="module")
def step():
    return footprint(setting(setup(WORKLOADS["transformer"]())))


@pytest.mark.parametrize("kind", ALLOCATORS)
def test_torch_reads_the_snapshot(step, kind):
    trace = step.program.at(40)
    found = pickle.loads(dump(trace, ALLOCATORS[kind](), step.labels))
    told = torch_viz.trace(found)
    assert f"{len(found['device_traces'][0])} entries" in told
    assert "raise OutOfMemoryError" not in told
    assert "active_allocated" in torch_viz.segments(found, format_flamegraph=str)
    assert "parameters" in torch_viz.memory(found, format_flamegraph=str)
    assert "Summary of segments" in torch_viz.segsum(found)
    assert "MemoryViz.js" in torch_viz.trace_plot(found)


@pytest.mark.parametrize("kind", ALLOCATORS)
def test_the_events_are_those_of_the_replay(step, kind):
    trace = step.program.at(40)
    found = snapshot(trace, ALLOCATORS[kind](), step.labels)
    outcome = replay(trace, ALLOCATORS[kind]())
    live: dict[int, int] = {}
    reserved = peak = 0
    for event in found["device_traces"][0]:
        start, end = event["addr"], event["addr"] + event["size"]
        if event["action"] == "alloc":
            # No two live blocks share an address.
            assert all(end <= other or other + size <= start for other, size in live.items())
            live[start] = event["size"]
        elif event["action"] == "free_completed":
            assert live.pop(start) == event["size"]
        elif event["action"] in ("segment_alloc", "segment_map"):
            reserved += event["size"]
        peak = max(peak, sum(live.values()))
    exact = replay(trace, CountingAllocator()).peak_allocated_bytes
    assert peak == exact
    held = sum(one["requested_size"] for one in found["segments"])
    assert held == sum(live.values())
    if outcome.reserved_bytes is not None:
        assert reserved == outcome.peak_reserved_bytes
        assert sum(one["total_size"] for one in found["segments"]) == outcome.reserved_bytes


def test_each_block_has_its_kind_and_module(step):
    found = snapshot(step.program.at(8), CachingAllocator(), step.labels)
    blocks = [one for one in found["device_traces"][0] if one["action"] == "alloc"]
    assert {one["category"] for one in blocks} >= {
        "parameters",
        "optimizer state",
        "gradients",
        "activations",
    }
    assert any(one["frames"][0]["name"] not in ("", "(no module)") for one in blocks)
    assert {one["frames"][-1]["name"] for one in blocks} == {"setup", "forward", "backward", "optimizer"}


def test_without_labels_the_phase_is_known(step):
    found = snapshot(step.program.at(8), CountingAllocator())
    assert {one["category"] for one in found["device_traces"][0]} == {"unknown"}
    assert all(one["frames"][-1]["filename"] == "phase" for one in found["device_traces"][0])


def test_the_page_of_torch_can_unpickle_it(step):
    content = dump(step.program.at(40), CachingAllocator(), step.labels)
    assert {code.name for code, _, _ in pickletools.genops(content)} <= OPCODES
