"""Opening the device that the user named."""

from __future__ import annotations

import os

import torch

from autobatch.core.errors import InputError
from autobatch.device import host
from autobatch.device.base import Device
from autobatch.device.cpu import CpuDevice, SimulatedDevice
from autobatch.device.cuda import CudaDevice
from autobatch.device.host import host_memory
from autobatch.device.profiles import load_profile


def device_kind(spec: str) -> str:
    """Return the kind of device of this name; ``auto`` is ``cuda`` if there is a GPU, else ``cpu``."""
    if spec == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return spec.partition(":")[0]


def open_device(spec: str, memory_budget: str | int | None) -> Device:
    """Open the device that ``auto``, ``cuda``, ``cuda:N``, ``cpu`` or ``sim:PROFILE`` names.

    Raises:
        InputError: There is no such device or profile, or the budget exceeds its memory.
        DoesNotFitError: No memory is left after the headroom.
    """
    kind, which = device_kind(spec), spec.partition(":")[2]
    if kind == "cpu" and not which:
        memory, ranks = host_memory(), os.environ.get("LOCAL_WORLD_SIZE", "1")
        if memory.available_bytes is not None and ranks.isdecimal() and int(ranks) > 1:
            share = memory.available_bytes // int(ranks)
            memory = memory._replace(
                available_bytes=share, source=f"{memory.source}, shared by {ranks} ranks"
            )
        notes = _unused_gpu_notes() if spec == "auto" else []
        return CpuDevice(memory, memory_budget, notes=notes)
    if kind == "cuda" and (not which or which.isdecimal()):
        return CudaDevice(index=int(which or 0), memory_budget=memory_budget)
    if kind == "sim" and which:
        return SimulatedDevice(load_profile(which), memory_budget)
    raise InputError(f"--device {spec} names no device: write auto, cuda, cuda:N, cpu or sim:PROFILE")


def _unused_gpu_notes() -> list[str]:
    """Return a note if the driver shows a GPU that torch cannot use; nothing if the environment hides it."""
    gpus = host.read_gpus()
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    if is_hidden or isinstance(gpus, str) or not gpus:
        return []
    return [
        f"this runs on the CPU: the driver shows {gpus[0].name or 'a GPU'}, which torch {torch.__version__}, "
        f"built for CUDA {torch.version.cuda or '(none)'}, cannot use; update the driver, or install a build "
        "of torch for the CUDA version that nvidia-smi shows"
    ]
