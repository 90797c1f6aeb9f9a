"""The settings of torch's allocator, and its recorded events as a trace."""

from __future__ import annotations

from autobatch.core.units import MiB
from autobatch.device.cuda import allocator_options
from autobatch.device.trace import FREE, trace_of

ON, OFF = "expandable_segments:True", "expandable_segments:False"


def test_the_first_variable_that_is_set_counts() -> None:
    for environ, asks in (
        ({}, False),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments : True"}, True),
        ({"PYTORCH_HIP_ALLOC_CONF": ON}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": ON}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": ON, "PYTORCH_ALLOC_CONF": OFF}, True),
    ):
        assert (ON.lower() in allocator_options(environ)) is asks


def entry(action: str, address: int, size: int = 0, **more: object) -> dict[str, object]:
    return {"action": action, "addr": address, "size": size, "stream": 0, **more}


def test_allocations_and_completed_frees_become_events() -> None:
    """An address that is used again is another block. Failed allocations have none (cuda/Module.cpp)."""
    entries = [
        entry("free_completed", 7),  # taken before the recording
        entry("alloc", 1000, 3 * MiB),
        {"action": "oom", "device_free": 5 * MiB, "size": 64 * MiB, "stream": 0},
        entry("free_requested", 1000),
        entry("free_completed", 1000),
        entry("segment_free", 9000, 20 * MiB),  # the cache is emptied
        entry("segment_free", 8000, 20 * MiB),
        entry("alloc", 1000, 2 * MiB),
    ]
    # Phases begin after so many allocations and frees, the free of the older block included.
    marks = [(1, "setup"), (2, "forward"), (4, "end")]
    trace = trace_of(entries, marks)
    assert trace.events == ((0, 3 * MiB), (0, FREE), (1, 2 * MiB))
    assert trace.marks == ((0, "setup"), (1, "forward"), (3, "end"))
    assert trace.releases == (2,)
