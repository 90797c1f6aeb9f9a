"""A package called torch that needs no GPU: it counts the memory that a program says it takes.

Its blocks have whole mebibytes, 20 at least. Each has a segment of its own, which the next block of its size
uses again, as torch's allocator does with blocks of such sizes. `PYTORCH_ALLOC_CONF` limits the segments, and
so does what `OTHERS_HOLD` says that other processes hold, in mebibytes.
"""

from __future__ import annotations

from pathlib import Path

TOTAL_BYTES = 8 << 30
"""Memory of its GPU."""
TORCH = """
import os, pickle, re, sys
from importlib.metadata import entry_points
from types import SimpleNamespace
from . import optim
from .optim import optimizer

done, events, observers, recording = [], [], [], {}
segments, free = {}, {}
counts = {"num_ooms": 0, "num_alloc_retries": 0, "allocated_bytes.all.peak": 0, "reserved_bytes.all.peak": 0}

class OutOfMemoryError(RuntimeError):
    pass

def limit():
    options = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", os.environ.get("PYTORCH_ALLOC_CONF", ""))
    most = float(re.search("fraction:([^,]*)|$", options)[1] or 1) * (8 << 30)
    return min(most, (8 << 30) - (int(os.environ.get("OTHERS_HOLD", "0")) << 20))

def take(mib):
    size = mib << 20
    if free.get(size):
        address = free[size].pop()
    else:
        if sum(segments.values()) + size > limit():
            counts["num_ooms"] += 1
            counts["num_alloc_retries"] += 1
            run_out(size)
        address = (len(segments) + 1) << 40
        segments[address] = size
        events.append({"action": "segment_alloc", "addr": address, "size": size, "stream": 0})
    events.append({"action": "alloc", "addr": address, "size": size, "stream": 0})
    reserved = sum(segments.values())
    allocated = reserved - sum(size * len(blocks) for size, blocks in free.items())
    counts["allocated_bytes.all.peak"] = max(counts["allocated_bytes.all.peak"], allocated)
    counts["reserved_bytes.all.peak"] = max(counts["reserved_bytes.all.peak"], reserved)
    return address

def give(address):
    free.setdefault(segments[address], []).append(address)
    events.append({"action": "free_completed", "addr": address, "size": segments[address], "stream": 0})

def run_out(size):
    for observer in observers:
        observer(0, size, 8 << 30, 0)
    raise OutOfMemoryError("CUDA out of memory")

def start(enabled="all", **how):
    recording.clear()
    if enabled:
        recording.update(how)

def dump(path):
    cached = {address for blocks in free.values() for address in blocks}
    parts = []
    for address, size in segments.items():
        state = "inactive" if address in cached else "active_allocated"
        blocks = [{"address": address, "size": size, "requested_size": size, "state": state}]
        parts.append({"device": 0, "address": address, "total_size": size, "stream": 0, "blocks": blocks})
    content = {"segments": parts, "device_traces": [events], "done": done, "how": dict(recording)}
    with open(path, "wb") as file:
        pickle.dump(content, file)

memory = SimpleNamespace(_record_memory_history=start, _dump_snapshot=dump)
cuda = SimpleNamespace(
    memory=memory, is_available=lambda: True, is_initialized=lambda: bool(done or segments),
    synchronize=lambda: None, device_count=lambda: 1, memory_stats=lambda device: counts,
)
_C = SimpleNamespace(_cuda_attach_out_of_memory_observer=observers.append)

for extension in entry_points(group="torch.backends"):
    extension.load()()
"""
OPTIMIZER = """
hooks = {}

class Handle:
    def __init__(self, hook):
        self.hook = hook
    def remove(self):
        hooks.pop(self.hook, None)

def register_optimizer_step_post_hook(hook):
    hooks[hook] = True
    return Handle(hook)

class Optimizer:
    param_groups = [{"params": [None]}]

    def step(self):
        import torch
        torch.done.append("step")
        for hook in list(hooks):
            hook(self, (), {})
"""


def install(folder: Path) -> Path:
    """Write the package, and return the folder to put on the path."""
    package = folder / "lib" / "torch" / "optim"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text(TORCH, encoding="utf-8")
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "optimizer.py").write_text(OPTIMIZER, encoding="utf-8")
    return folder / "lib"
