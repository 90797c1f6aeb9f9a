"""Opening the device that the user named."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autobatch.core.errors import InputError
from autobatch.device import nvml, private
from autobatch.device.base import Device
from autobatch.device.cpu import CpuDevice
from autobatch.device.cuda import CudaDevice
from autobatch.device.cuda_gpus import FORKED
from autobatch.device.host import HostMemory, host_memory
from autobatch.device.profiles import data_home, load_profile
from autobatch.device.simulated import SimulatedDevice


def device_kind(spec: str) -> str:
    """Return the kind of device of this name; ``auto`` is ``cuda`` if there is a GPU, else ``cpu``."""
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
        notes = unused_gpu_notes(environ) if spec == "auto" else []
        return CpuDevice(memory_budget=memory_budget, memory=_share_of_host(environ), notes=notes)
    if kind == "cuda" and (not which or which.isdecimal()):
        return CudaDevice(index=int(which or 0), memory_budget=memory_budget)
    if kind == "sim" and which:
        profile = load_profile(which, user_dir=data_home(environ))
        return SimulatedDevice(profile, memory_budget=memory_budget)
    raise InputError(f"--device {spec} names no device: write auto, cuda, cuda:N, cpu or sim:PROFILE")


def unused_gpu_notes(environ: Mapping[str, str]) -> list[str]:
    """Return a note if the driver shows a GPU that torch cannot use; nothing if the environment hides it."""
    if environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        return []
    gpus = nvml.read_gpus()
    if isinstance(gpus, nvml.NvmlAbsent) or not gpus:
        return []
    if private.is_forked_from_cuda():
        return [f"this runs on the CPU: {FORKED}"]
    built, advice = "without CUDA", "install a build with CUDA"
    if torch.version.cuda is not None:
        built = f"for CUDA {torch.version.cuda}"
        advice = "update the driver, or install a build for the CUDA version that nvidia-smi shows"
    return [
        f"this runs on the CPU: the driver shows {gpus[0].name or 'a GPU'}, which torch {torch.__version__}, "
        f"built {built}, cannot use; {advice}"
    ]


def _share_of_host(environ: Mapping[str, str]) -> HostMemory:
    """Return the memory of this host that one of its ranks may use; all of it without ranks."""
    memory, ranks = host_memory(), environ.get("LOCAL_WORLD_SIZE", "1")
    if memory.available_bytes is None or not ranks.isdecimal() or int(ranks) < 2:
        return memory
    share = memory.available_bytes // int(ranks)
    return memory._replace(available_bytes=share, source=f"{memory.source}, shared by {ranks} ranks")


def device_of_rank(spec: str, *, local_rank: int, local_world: int, gpus: int) -> str:
    """Return the device that one of several ranks of this host opens for the one that was asked for.

    Args:
        spec: ``auto``, ``cuda``, ``cuda:N``, ``cpu`` or ``sim:PROFILE``.
        local_rank: Place among the ranks of this host.
        local_world: Ranks of this host.
        gpus: GPUs that the process sees.

    Raises:
        InputError: Several ranks would share a GPU.
    """
    kind, _, index = spec.partition(":")
    if kind not in ("auto", "cuda") or (kind == "auto" and not gpus):
        return spec
    if index and local_world > 1:
        raise InputError(
            f"--device {spec} is one GPU, and {local_world} ranks run on this host: use --device cuda, which "
            "gives each rank its own"
        )
    if index:
        return spec
    if gpus == 1:
        # A scheduler may show each process its own GPU only; ranks that share one are found later.
        return "cuda:0"
    if local_rank >= gpus:
        raise InputError(
            f"{local_world} ranks run on this host, which shows {gpus} GPUs: start one rank per GPU with "
            f"--nproc-per-node {gpus}"
        )
    return f"cuda:{local_rank}"


def gpu_uuid(spec: str) -> str | None:
    """Return the identifier of the GPU of this name; None if the name has no number of a GPU."""
    kind, _, index = spec.partition(":")
    if kind != "cuda" or not index:
        return None
    return str(torch.cuda.get_device_properties(int(index)).uuid)
