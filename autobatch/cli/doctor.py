"""Examination of the machine for ``autobatch doctor``."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import msgspec

from autobatch.core.units import format_bytes
from autobatch.device.profiles import data_home

PACKAGES = ("torch", "nvidia-ml-py", "optuna", "scipy", "numpy", "safetensors", "matplotlib", "tensorboard")
"""Distributions whose versions belong in a bug report."""


def examine() -> dict[str, Any]:
    """Examine the machine: host, GPUs, NVML, versions, and what is missing."""
    import torch

    from autobatch.device.cuda_gpus import lacking_kernels, visible_gpus
    from autobatch.device.host import cpu_name, host_memory
    from autobatch.device.nvml import NvmlAbsent, read_gpus, read_holders

    memory = host_memory()
    gpus = visible_gpus()
    lacking = [lacking_kernels(gpu.index, _numbers(gpu.capability)) for gpu in gpus]
    reading = read_gpus()
    absent = isinstance(reading, NvmlAbsent)
    nvml: dict[str, Any] = {"available": not absent}
    if isinstance(reading, NvmlAbsent):
        nvml["reason"] = reading.reason
    else:
        nvml["gpus"] = [
            msgspec.to_builtins(gpu) | {"holders": _holders(read_holders(gpu.uuid))} for gpu in reading.gpus
        ]
    return {
        "host": {"name": cpu_name(), **memory._asdict(), "cores": os.cpu_count()},
        "cuda": {
            "available": torch.cuda.is_available(),
            "built_for": torch.version.cuda,
            "gpus": msgspec.to_builtins(gpus),
        },
        "nvml": nvml,
        "versions": {"python": platform.python_version(), **_versions()},
        "home": str(data_home(os.environ)),
        "missing": [
            *_missing(torch.version.cuda, torch.cuda.is_available(), nvml),
            *(f"kernels: {one}" for one in lacking if one is not None),
        ],
    }


def doctor_lines(findings: dict[str, Any]) -> list[str]:
    """Return the findings as lines of text."""
    host, cuda, nvml = findings["host"], findings["cuda"], findings["nvml"]
    build = f"torch built for CUDA {cuda['built_for']}" if cuda["built_for"] else "torch built without CUDA"
    lines = [
        f"host     {host['name']}, {host['cores']} cores",
        f"memory   {format_bytes(host['available_bytes'])} available of {format_bytes(host['total_bytes'])}"
        f" ({host['source']})",
        f"cuda     {build}",
    ]
    lines += [
        f"         cuda:{gpu['index']} {gpu['name']}, {format_bytes(gpu['total_bytes'])}, "
        f"{format_bytes(gpu['free_bytes'])} free, cc {gpu['capability']}"
        for gpu in cuda["gpus"]
    ]
    lines.append(f"nvml     {'available' if nvml['available'] else 'not available: ' + nvml['reason']}")
    for gpu in nvml.get("gpus", ()):
        lines.append(f"         {gpu['name']}: {format_bytes(gpu['free_bytes'])} free")
        for holder in gpu["holders"]:
            who = f"process {holder['pid']} {holder['name'] or ''}"
            lines.append(f"           {who} {format_bytes(holder['used_bytes'])}")
    versions = findings["versions"]
    lines.append(
        "versions " + ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    )
    lines.append(f"home     {findings['home']}")
    lines += [f"missing  {line}" for line in findings["missing"]]
    return lines


def _numbers(capability: str) -> tuple[int, int]:
    major, minor = capability.split(".")
    return int(major), int(minor)


def _holders(found: Any) -> list[Any]:
    return msgspec.to_builtins(found) if isinstance(found, list) else []


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _missing(built_for: str | None, available: bool, nvml: dict[str, Any]) -> list[str]:
    missing = []
    if built_for is None:
        missing.append("CUDA: torch was built without it, so training runs on the CPU or on sim:PROFILE")
    elif not available:
        missing.append("a CUDA GPU that torch can use: check the driver and CUDA_VISIBLE_DEVICES")
    if not nvml["available"]:
        missing.append("NVML: budgets use the free memory that the CUDA driver reports")
    return missing
