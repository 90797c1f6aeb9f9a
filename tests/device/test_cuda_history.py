"""A snapshot's entries as a trace, and a torch without the history, which records nothing."""

from __future__ import annotations

import pytest
import torch

from autobatch.core.units import MiB
from autobatch.device.allocator.caching import CachingAllocator
from autobatch.device.allocator.trace import FREE, Trace, replay
from autobatch.device.cuda_allocator import History, recorded, trace_of


def entry(action: str, address: int, size: int = 0) -> dict[str, object]:
    return {"action": action, "addr": address, "size": size, "stream": 0}


def test_allocations_and_completed_frees_become_events() -> None:
    trace = trace_of(
        [
            entry("free_completed", 7),  # taken before the recording
            entry("segment_alloc", 1000, 20 * MiB),
            entry("alloc", 1000, 3 * MiB),
            entry("alloc", 2000, 5 * MiB),
            entry("free_requested", 1000),
            entry("free_completed", 1000),
            entry("alloc", 1000, 2 * MiB),
            entry("snapshot", 0),
        ]
    )
    sizes = [size for _, size in trace.events]
    assert sizes == [3 * MiB, 5 * MiB, FREE, 2 * MiB]
    first, second, freed, third = (block for block, _ in trace.events)
    assert freed == first
    assert len({first, second, third}) == 3, "an address that is used again is another block"
    outcome = replay(trace, CachingAllocator(40 * MiB))
    assert outcome.fits
    assert outcome.peak_allocated_bytes == 8 * MiB


def test_a_failed_allocation_has_no_address_and_is_no_event() -> None:
    """torch writes ``device_free`` in its place (torch/csrc/cuda/Module.cpp)."""
    failed = {"action": "oom", "device_free": 5 * MiB, "size": 64 * MiB, "stream": 0}
    with_it = trace_of([entry("alloc", 1000, 3 * MiB), failed, entry("alloc", 2000, MiB)])
    assert with_it == trace_of([entry("alloc", 1000, 3 * MiB), entry("alloc", 2000, MiB)])


@pytest.mark.parametrize("entries", [[{"kind": "alloc"}], [{"action": "alloc", "size": 8}], [None]])
def test_entries_in_another_format_give_no_trace(monkeypatch: pytest.MonkeyPatch, entries: list) -> None:
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda _: {"device_traces": [entries]})
    assert History(0, recording=True).trace() is None
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda _: {"device_traces": [[entry("alloc", 1, 8)]]})
    assert History(0, recording=True).trace() == Trace(((0, 8),))


def test_a_torch_that_cannot_record_gives_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(**_: object) -> None:
        raise TypeError("unexpected keyword")

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", gone)
    with recorded(0) as history:
        assert history.trace() is None
    assert History(0, recording=False).trace() is None


def test_private_pools_give_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a CUDA graph are in a pool of their own, which no replay knows."""
    for pool, traced in (((0, 0), True), ((0, 3), False)):
        entries = [entry("alloc", 1, 8) | {"pool_id": pool}]
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda _, e=entries: {"device_traces": [e]})
        assert (History(0, recording=True).trace() is not None) is traced


def test_a_recording_that_lost_its_beginning_gives_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps the last entries of a recording that is too long, so that a full one may be incomplete."""
    monkeypatch.setattr("autobatch.device.cuda_allocator.MOST_EVENTS", 3)
    for count in (2, 3):
        entries = [entry("alloc", number, 8) for number in range(count)]
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda _, e=entries: {"device_traces": [e]})
        assert (History(0, recording=True).trace() is not None) is (count < 3)


@pytest.mark.parametrize(
    ("device", "pool", "traced"), [(0, (0, 0), True), (0, (0, 3), False), (1, (0, 3), True)]
)
def test_private_pools_are_known_by_their_segments_on_a_torch_whose_entries_name_none(
    monkeypatch: pytest.MonkeyPatch, device: int, pool: tuple[int, int], traced: bool
) -> None:
    """torch 2.11 writes ``segment_pool_id`` of each segment, and no ``pool_id`` of an entry."""
    segment = {"device": device, "address": 1, "total_size": 2 * MiB, "segment_pool_id": pool}
    snapshot = {"device_traces": [[entry("alloc", 1, 8)]], "segments": [segment]}
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda _: snapshot)
    assert (History(0, recording=True).trace() is not None) is traced


@pytest.mark.parametrize(("is_modelled", "is_recording"), [(False, False), (True, True), (True, False)])
def test_nothing_is_recorded_that_no_replay_knows_or_that_the_user_records(
    monkeypatch: pytest.MonkeyPatch, is_modelled: bool, is_recording: bool
) -> None:
    calls: list[object] = []
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda *, enabled, **_: calls.append(enabled)
    )
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: is_recording, raising=False)
    entries = {"device_traces": [[entry("alloc", 1, 8)]]}
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda _: entries)
    is_recorded = is_modelled and not is_recording
    with recorded(0, is_modelled=is_modelled) as history:
        assert (history.trace() is not None) is is_recorded
    assert calls == (["all", None] if is_recorded else [])
