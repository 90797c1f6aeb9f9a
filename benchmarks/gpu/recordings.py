"""Recordings of a GPU's allocator: stored for the tests, and compared with the model of the allocator."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from autobatch.core.options import Options
from autobatch.device.allocator.caching import AllocatorConfig, CachingAllocator
from autobatch.rehearsal.attempt import attempt
from autobatch.rehearsal.setup import Setup, open_setup
from benchmarks.gpu.device import NAME, about, empty, recorded_entries
from benchmarks.gpu.workloads import CASES

KEPT = ("alloc", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap")
"""Actions of ``torch.cuda.memory._snapshot()["device_traces"]`` that a replay needs."""
TRACED = (2, 8, 16, 31, 32, 48, 64)
"""Micro-batches whose events are compared with each other."""
GOLDEN_FILE = "golden.json.gz"
TRACES_FILE = "traces.jsonl.gz"


class Mismatch(NamedTuple):
    """An entry at which the model reserves another amount than the GPU."""

    index: int
    gpu_bytes: int
    model_bytes: int


def reduced(entries: Iterable[Mapping[str, Any]]) -> list[tuple[str, int, int]]:
    """Return action, address and size of the entries that a replay needs, relative to the lowest address."""
    # An allocation that failed has no address, and reserves nothing.
    kept = [(e["action"], int(e["addr"]), int(e["size"])) for e in entries if e["action"] in KEPT]
    lowest = min((address for _, address, _ in kept), default=0)
    return [(action, address - lowest, size) for action, address, size in kept]


def mismatches(
    entries: Iterable[tuple[str, int, int]], config: AllocatorConfig | None = None
) -> list[Mismatch]:
    """Replay the entries of a GPU through the model, and compare what both reserve after every allocation.

    The recording must begin with nothing reserved. Segments that the GPU frees (after ``empty_cache``, or
    to make room) are freed by the model at the next allocation.
    """
    model = CachingAllocator(None, config)
    handles: dict[int, Any] = {}
    found: list[Mismatch] = []
    reserved, gave_back = 0, False
    for index, (action, address, size) in enumerate(entries):
        if action in ("segment_alloc", "segment_map"):
            reserved += size
        elif action in ("segment_free", "segment_unmap"):
            reserved -= size
            gave_back = True
        elif action == "free_completed" and address in handles:
            model.free(handles.pop(address))
        elif action == "alloc":
            if gave_back:
                model.release()
                gave_back = False
            handles[address] = model.malloc(size)
            if model.reserved_bytes != reserved:
                found.append(Mismatch(index, reserved, model.reserved_bytes))
    return found


def setup_of(name: str) -> Setup:
    """Open a case on the GPU."""
    case = CASES[name]
    return open_setup(case.make(), Options().with_values(device=NAME, **case.options))


def golden(name: str, size: int, out: Path) -> dict[str, Any]:
    """Store the allocator's entries of one attempt, and compare the model of the allocator with them."""
    setup = setup_of(name)
    empty()
    with recorded_entries() as entries:
        attempt(setup, size)
        seen = reduced(entries())
    wrong = mismatches(seen)
    content = about() | {"workload": name, "micro_batch": size, "entries": seen}
    (out / GOLDEN_FILE).write_bytes(gzip.compress(json.dumps(content).encode(), mtime=0))
    first = [one._asdict() for one in wrong[:3]]
    return {"file": GOLDEN_FILE, "entries": len(seen), "mismatches": len(wrong), "first": first}


def traces(name: str, out: Path) -> dict[str, Any]:
    """Store the events of a step at several micro-batches, and return how they differ.

    ``bent`` has the sizes at 16, 32 and 64 of events that are no straight line through the three.
    """
    setup = setup_of(name)
    found: dict[int, Any] = {}
    for size in TRACED:
        trace = attempt(setup, size).trace
        found[size] = None if trace is None else trace.canonical().events
    again = attempt(setup, TRACED[-1]).trace
    lines = [
        {"workload": name, "precision": setup.precision, "micro_batch": size, "events": events}
        for size, events in found.items()
        if events is not None
    ]
    with (out / TRACES_FILE).open("ab") as file:  # a gzip file may have several members
        file.write(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode(), mtime=0))
    a, b, c = (found[size] or () for size in (16, 32, 64))
    bent = []
    if len(a) == len(b) == len(c):
        sizes = zip((e[1] for e in a), (e[1] for e in b), (e[1] for e in c), strict=True)
        bent = [(x, y, z) for x, y, z in sizes if x >= 0 and z - y != 2 * (y - x)]
    return {
        "events": {str(size): None if events is None else len(events) for size, events in found.items()},
        "same_twice": again is not None and again.canonical().events == found[TRACED[-1]],
        "alike": len(a) == len(b) == len(c),
        "bent": len(bent),
        "first_bent": bent[:8],
    }
