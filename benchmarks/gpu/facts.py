"""Facts that the code takes for granted about a GPU, each read off it. None takes more than about 6 GiB."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from autobatch.core.units import GiB
from benchmarks.gpu.device import GPU, about, room
from benchmarks.gpu.speed import timed


def outside_bytes() -> int:
    """Return the memory in use that the allocator of this process does not hold."""
    free, total = torch.cuda.mem_get_info(GPU)
    return total - free - torch.cuda.memory_reserved(GPU)


def versions() -> dict[str, Any]:
    """Read names, versions and totals, and check that torch and the driver agree on the total."""
    properties = about()
    total = torch.cuda.mem_get_info(GPU)[1]
    return properties | {"driver_total_bytes": total, "totals_agree": total == properties["total_bytes"]}


def growth_of_context() -> dict[str, int]:
    """Return the bytes outside the allocator after each kind of kernel was loaded."""
    found = {"context": outside_bytes()}
    x = torch.randn(512, 512, device=GPU, requires_grad=True)
    (x @ x).sum().backward()
    found["fp32 product"] = outside_bytes()
    with torch.autocast(GPU.type, torch.bfloat16):
        (x @ x).float().sum().backward()
    found["bf16 product"] = outside_bytes()
    convolution = nn.Conv2d(3, 64, 3, padding=1).to(GPU)
    convolution(torch.randn(8, 3, 64, 64, device=GPU)).sum().backward()
    found["convolution"] = outside_bytes()
    q = torch.randn(2, 8, 512, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    functional.scaled_dot_product_attention(q, q, q, is_causal=True).float().sum().backward()
    found["attention"] = outside_bytes()
    torch.optim.AdamW(convolution.parameters()).step()
    found["optimizer"] = outside_bytes()
    return found


def speeds() -> dict[str, float]:
    """Return bytes per second of a copy within the GPU, and bf16 operations per second of a large product."""
    side, size = 8192, min(4 * GiB, room() // 8)
    a = torch.randn(side, side, device=GPU, dtype=torch.bfloat16)
    x = torch.empty(size, dtype=torch.uint8, device=GPU)
    y = torch.empty_like(x)
    product = min(timed(lambda: a @ a, 10))
    copy = min(timed(lambda: y.copy_(x), 10))
    return {"bytes_per_second": 2 * size / copy, "bf16_per_second": 2 * side**3 / product}


FACTS: dict[str, Callable[[], dict[str, Any]]] = {
    "versions": versions,
    "context": growth_of_context,  # before anything else loads kernels
    "speeds": speeds,
}
"""Every fact by name, in the order of reading."""
