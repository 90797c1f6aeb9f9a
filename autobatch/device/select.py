"""Opening the device that the user named."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autobatch.core.errors import InputError
from autobatch.device.base import Device
from autobatch.device.cpu import CpuDevice
from autobatch.device.cuda import CudaDevice
from autobatch.device.profiles import data_home, load_profile
from autobatch.device.simulated import SimulatedDevice


def device_kind(spec: str) -> str:
    """Return the kind of device that a name stands for; ``auto`` is ``cuda`` or ``cpu``, as is found."""
    if spec == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return spec.partition(":")[0]


def open_device(spec: str, *, memory_budget: str | int | None, environ: Mapping[str, str]) -> Device:
    """Open the device that ``auto``, ``cuda``, ``cuda:N``, ``cpu`` or ``sim:PROFILE`` names.

    Raises:
        InputError: There is no such device or profile, or the budget exceeds its memory.
        DoesNotFitError: No memory is left after the headroom.
    """
    kind, which = device_kind(spec), spec.partition(":")[2]
    if kind == "cpu" and not which:
        return CpuDevice(memory_budget=memory_budget)
    if kind == "cuda" and (not which or which.isdecimal()):
        return CudaDevice(index=int(which or 0), memory_budget=memory_budget)
    if kind == "sim" and which:
        profile = load_profile(which, user_dir=data_home(environ))
        return SimulatedDevice(profile, memory_budget=memory_budget)
    raise InputError(f"--device {spec} names no device: write auto, cuda, cuda:N, cpu or sim:PROFILE")
