"""Facts that the code takes for granted about a GPU, each read off it. None takes more than about 6 GiB."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from autobatch.core.units import GiB, KiB, MiB
from autobatch.device import nvml
from autobatch.device.base import Device
from autobatch.device.cuda_allocator import trace_of
from benchmarks.gpu.device import BUSY_CYCLES, GPU, about, empty, open_gpu, recorded_entries, room


def outside_bytes() -> int:
    """Return the memory in use that the allocator of this process does not hold."""
    free, total = torch.cuda.mem_get_info(GPU)
    return total - free - torch.cuda.memory_reserved(GPU)


def versions() -> dict[str, Any]:
    """Read names, versions and totals, and check that torch and the driver agree on the total."""
    properties = about()
    total = torch.cuda.mem_get_info(GPU)[1]
    return properties | {"driver_total_bytes": total, "totals_agree": total == properties["total_bytes"]}


def readings_of_nvml() -> dict[str, Any]:
    """Read NVML, and check that it lists this process."""
    start = time.perf_counter()
    gpu = nvml.read_gpu(about()["uuid"])
    seconds = time.perf_counter() - start
    listed = [] if isinstance(gpu, nvml.NvmlAbsent) else [one.pid for one in gpu.holders]
    return {
        "gpu": str(gpu),
        "free_bytes": getattr(gpu, "free_bytes", None),
        "cuda_free_bytes": torch.cuda.mem_get_info(GPU)[0],
        "seconds": round(seconds, 4),
        "lists_this_process": os.getpid() in listed,
    }


def growth_of_context() -> dict[str, int]:
    """Return the bytes outside the allocator after each kind of kernel was loaded."""
    device = GPU
    found = {"context": outside_bytes()}
    x = torch.randn(512, 512, device=device, requires_grad=True)
    (x @ x).sum().backward()
    found["fp32 product"] = outside_bytes()
    with torch.autocast(device.type, torch.bfloat16):
        (x @ x).float().sum().backward()
    found["bf16 product"] = outside_bytes()
    convolution = nn.Conv2d(3, 64, 3, padding=1).to(device)
    convolution(torch.randn(8, 3, 64, 64, device=device)).sum().backward()
    found["convolution"] = outside_bytes()
    q = torch.randn(2, 8, 512, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    functional.scaled_dot_product_attention(q, q, q, is_causal=True).float().sum().backward()
    found["attention"] = outside_bytes()
    torch.optim.AdamW(convolution.parameters()).step()
    found["optimizer"] = outside_bytes()
    return found


def workspaces() -> dict[str, Any]:
    """Return the blocks of 1 MiB and more that products take and keep, with and without bias, twice."""
    found: dict[str, Any] = {}
    for bias in (True, False):
        for turn in (1, 2):
            layer = nn.Linear(256, 256, bias=bias).to(GPU)
            x = torch.randn(64, 256, device=GPU)
            empty()
            before = torch.cuda.memory_reserved(GPU)
            with recorded_entries() as entries:
                for _ in range(2):
                    layer(x).sum().backward()
                seen = entries()
            found[f"bias {bias}, turn {turn}"] = large_blocks(seen) | {"reserved_before": before}
    return found


def large_blocks(entries: Iterable[Mapping[str, Any]]) -> dict[str, dict[int, int]]:
    """Count the blocks of at least 1 MiB by size: those taken, and those never freed."""
    taken, live = [], {}
    for entry in entries:
        if entry["action"] == "alloc":
            live[entry["addr"]] = entry["size"]
            taken.append(entry["size"])
        elif entry["action"] == "free_completed":
            live.pop(entry["addr"], None)
    return {
        "taken": dict(Counter(size for size in taken if size >= MiB)),
        "kept": dict(Counter(size for size in live.values() if size >= MiB)),
    }


def start_of_sessions() -> dict[str, list[int]]:
    """Return what the allocator holds as each of three sessions starts; 0 is right."""
    device, found = open_gpu(4 * GiB), []
    for _ in range(3):
        with device.enforced() as meter:
            found.append(meter.stats().reserved_bytes or 0)
            x = torch.randn(64, 64, device=GPU, requires_grad=True)
            (x @ x).sum().backward()
            del x
    return {"reserved_bytes": found}


def refused_allocation() -> dict[str, Any]:
    """Return the keys of the entry of an allocation that failed, and how our reader takes it."""
    # Not `enforced`, which records for itself.
    with open_gpu(GiB).training(), recorded_entries() as entries:
        with contextlib.suppress(torch.OutOfMemoryError):
            torch.empty(2 * GiB, dtype=torch.uint8, device=GPU)
        seen = entries()
    refused = [one for one in seen if one["action"] == "oom"]
    return {"keys": sorted(refused[0]) if refused else None, "events": len(trace_of(seen).events)}


def cap() -> dict[str, Any]:
    """Fill the budget in pieces: it holds all and never more."""
    return {"fixed": fill(open_gpu(5000 * MiB))}


def fill(device: Device) -> dict[str, Any]:
    """Return how many fiftieths of the budget the allocator holds, and its figures."""
    held = []
    with device.enforced() as meter:
        with contextlib.suppress(torch.OutOfMemoryError):
            while len(held) < 1000:
                size = device.budget_bytes // 50
                held.append(torch.empty(size, dtype=torch.uint8, device=GPU))
        stats = meter.stats()
        pieces = len(held)
        held.clear()
    return {
        "pieces": pieces,
        "peak_reserved_bytes": stats.peak_reserved_bytes,
        "budget_bytes": device.budget_bytes,
        "retries": stats.retries,
    }


def warning_of_debug_mode() -> dict[str, Any]:
    """Return the warnings of torch's mode that reports waits."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("error")
        torch.cuda.set_sync_debug_mode("default")
    return {"warnings": [str(one.message)[:100] for one in seen]}


def copies() -> dict[str, float]:
    """Return the seconds that the call of a copy takes while the GPU is busy for 0.2 seconds.

    A copy that takes that long made the host wait for the stream.
    """
    found = {}
    for pinned in (False, True):
        for size in (4 * KiB, MiB, 64 * MiB):
            x = torch.empty(size, dtype=torch.uint8)
            x = x.pin_memory() if pinned else x
            x.to(GPU, non_blocking=True)
            torch.cuda.synchronize(GPU)
            torch.cuda._sleep(BUSY_CYCLES)
            start = time.perf_counter()
            x.to(GPU, non_blocking=True)
            found[f"{'pinned' if pinned else 'pageable'} {size}"] = time.perf_counter() - start
            torch.cuda.synchronize(GPU)
    return {name: round(seconds, 5) for name, seconds in found.items()}


def speeds() -> dict[str, float]:
    """Return bytes per second of a copy within the GPU, and bf16 operations per second of a large product."""
    side, size = 8192, min(4 * GiB, room() // 8)
    a = torch.randn(side, side, device=GPU, dtype=torch.bfloat16)
    x = torch.empty(size, dtype=torch.uint8, device=GPU)
    y = torch.empty_like(x)
    product = shortest(lambda: a @ a)
    copy = shortest(lambda: y.copy_(x))
    return {"bytes_per_second": 2 * size / copy, "bf16_per_second": 2 * side**3 / product}


def shortest(run: Callable[[], object], times: int = 10) -> float:
    """Return the seconds of the quickest of some runs, each waited for."""
    found = []
    for _ in range(times):
        torch.cuda.synchronize(GPU)
        start = time.perf_counter()
        run()
        torch.cuda.synchronize(GPU)
        found.append(time.perf_counter() - start)
    return min(found)


def norms() -> dict[str, Any]:
    """Return the blocks that an RMSNorm of 64 MiB takes, in fp32 and under autocast."""
    found: dict[str, Any] = {}
    rows = 16384
    layer = nn.RMSNorm(1024).to(GPU)
    for precision in ("fp32", "bf16"):
        x = torch.randn(rows, 1024, device=GPU, requires_grad=True)
        with recorded_entries() as entries, warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            with torch.autocast(GPU.type, torch.bfloat16, enabled=precision == "bf16"):
                kept = layer(x)
            found[precision] = large_blocks(entries())
        found[precision]["warnings"] = [str(one.message)[:120] for one in seen]
        del kept
    return found


def pools() -> dict[str, Any]:
    """Return where a snapshot names the pool of a CUDA graph, and whether no trace is made of it."""
    x = torch.ones(MiB, device=GPU)
    with open_gpu(GiB).enforced() as meter:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = x * 2
        is_refused = meter.trace() is None
        snapshot = torch.cuda.memory._snapshot(0)
    found = {
        "entries": sorted({str(one.get("pool_id")) for one in snapshot["device_traces"][0]}),
        "segments": sorted({str(one.get("segment_pool_id")) for one in snapshot["segments"]}),
        "is_refused": is_refused,
    }
    del kept, graph
    return found


ATTENTIONS: dict[str, tuple[torch.dtype, bool, bool, float]] = {
    "bf16": (torch.bfloat16, False, False, 0.0),
    "bf16 causal": (torch.bfloat16, True, False, 0.0),
    "bf16 mask": (torch.bfloat16, False, True, 0.0),
    "bf16 dropout": (torch.bfloat16, False, False, 0.1),
    "fp32": (torch.float32, False, False, 0.0),
    "fp32 causal": (torch.float32, True, False, 0.0),
    "fp32 mask": (torch.float32, False, True, 0.0),
}
"""Data type, causal, mask and dropout of the attentions that are measured."""


def attention() -> dict[str, Any]:
    """Return what each kernel of attention keeps and what its backward pass takes, in bytes."""
    found: dict[str, Any] = {}
    for name, (dtype, causal, masked, dropout) in ATTENTIONS.items():
        shape = (8, 16, 1024, 64)
        qkv = [torch.randn(shape, device=GPU, dtype=dtype, requires_grad=True) for _ in range(3)]
        side = shape[2]
        mask = torch.zeros(1, 1, side, side, device=GPU, dtype=dtype) if masked else None
        options = {"is_causal": causal, "attn_mask": mask, "dropout_p": dropout}
        row: dict[str, Any] = {"choice": int(torch._fused_sdp_choice(*qkv, **options))}
        for backend in (
            None,
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
        ):
            label = "default" if backend is None else backend.name
            try:
                with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
                    row[label] = memory_of_attention(qkv, options)
            except RuntimeError as error:  # this kernel does not take these inputs
                row[label] = str(error).splitlines()[0][:100]
        found[name] = row
    return found


def memory_of_attention(qkv: list[torch.Tensor], options: dict[str, Any]) -> dict[str, int]:
    """Return the bytes of the second forward and backward pass, when all plans are made."""
    found = {}
    for _ in range(2):
        for tensor in qkv:
            tensor.grad = None
        empty()
        torch.cuda.reset_peak_memory_stats(GPU)
        base = torch.cuda.memory_allocated(GPU)
        out = functional.scaled_dot_product_attention(*qkv, **options)
        forward, kept = torch.cuda.max_memory_allocated(GPU) - base, torch.cuda.memory_allocated(GPU) - base
        gradient = torch.ones_like(out)
        torch.cuda.reset_peak_memory_stats(GPU)
        before = torch.cuda.memory_allocated(GPU)
        out.backward(gradient)
        backward = torch.cuda.max_memory_allocated(GPU) - before
        found = {"kept": kept, "forward": forward, "backward": backward}
        del out, gradient
    gradients = sum(tensor.grad.nbytes for tensor in qkv if tensor.grad is not None)
    return found | {"gradients": gradients}


FACTS: dict[str, Callable[[], dict[str, Any]]] = {
    "versions": versions,
    "context": growth_of_context,  # before anything else loads kernels
    "nvml": readings_of_nvml,
    "workspaces": workspaces,
    "sessions": start_of_sessions,
    "refused": refused_allocation,
    "cap": cap,
    "debug-mode": warning_of_debug_mode,
    "copies": copies,
    "attention": attention,
    "norms": norms,
    "pools": pools,
    "speeds": speeds,
}
"""Every fact by name, in the order of reading."""
