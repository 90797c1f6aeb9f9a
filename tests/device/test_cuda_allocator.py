"""The settings of torch's allocator, and its recorded events as a trace."""

from __future__ import annotations

from autobatch.core.units import MiB
from autobatch.device.allocator.trace import FREE, trace_of
from autobatch.device.cuda_allocator import allocator_options

FIRST_SET: list[tuple[dict[str, str], bool]] = [
    ({}, False),
    ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, True),
    ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments : True"}, True),
    ({"PYTORCH_HIP_ALLOC_CONF": "expandable_segments:True"}, True),
    ({"PYTORCH_CUDA_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}, False),
    (
        {
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "PYTORCH_ALLOC_CONF": "expandable_segments:False",
        },
        True,
    ),
]


def test_the_first_variable_that_is_set_counts() -> None:
    for environ, asks in FIRST_SET:
        assert ("expandable_segments:true" in allocator_options(environ)) is asks


def entry(action: str, address: int, size: int = 0, **more: object) -> dict[str, object]:
    return {"action": action, "addr": address, "size": size, "stream": 0, **more}


def test_allocations_and_completed_frees_become_events() -> None:
    """An address that is used again is another block. Failed allocations have none (cuda/Module.cpp)."""
    entries = [
        entry("free_completed", 7),  # taken before the recording
        entry("segment_alloc", 1000, 20 * MiB),
        entry("alloc", 1000, 3 * MiB),
        entry("alloc", 2000, 5 * MiB),
        {"action": "oom", "device_free": 5 * MiB, "size": 64 * MiB, "stream": 0},
        entry("free_requested", 1000),
        entry("free_completed", 1000),
        entry("segment_free", 9000, 20 * MiB),  # the cache is emptied
        entry("segment_free", 8000, 20 * MiB),
        entry("alloc", 1000, 2 * MiB),
        entry("snapshot", 0),
    ]
    # Phases begin after so many allocations and frees, the free of the older block included.
    marks = [(1, "setup"), (3, "forward"), (4, "backward"), (5, "end")]
    trace = trace_of(entries, marks)
    assert trace.canonical().events == ((0, 3 * MiB), (1, 5 * MiB), (0, FREE), (2, 2 * MiB))
    assert trace.marks == tuple(marks)
    assert trace.releases == (4,)
