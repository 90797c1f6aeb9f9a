"""Requirements of torch.compile on a machine, and the one that is missing there."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

LEAST_CAPABILITY = (7, 0)
"""The first GPUs for which Inductor has kernels (``has_triton`` in torch/utils/_triton.py)."""


def missing_on_cpu() -> str | None:
    """Return what is missing for kernels of the CPU, which Inductor writes in C++; None if nothing."""
    if not _is_found(os.environ.get("CXX"), "g++", "clang++", "c++"):
        return "torch.compile needs a C++ compiler on the CPU"
    return _headers_missing()


def missing_on_gpu(capability: tuple[int, int]) -> str | None:
    """Return what is missing for kernels of a GPU, which Triton compiles; None if nothing.

    Triton compiles a module in C that launches them (triton/runtime/build.py).
    """
    if capability < LEAST_CAPABILITY:
        needed, found = (".".join(map(str, one)) for one in (LEAST_CAPABILITY, capability))
        return f"torch.compile needs a GPU of compute capability {needed} or later, found {found}"
    if importlib.util.find_spec("triton") is None:
        return "torch.compile needs triton on a GPU"
    if not _is_found(os.environ.get("CC"), "gcc", "clang"):
        return "torch.compile needs gcc or clang on a GPU"
    return _headers_missing()


def _is_found(*programs: str | None) -> bool:
    return any(program and shutil.which(program) for program in programs)


def _headers_missing() -> str | None:
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    return None if headers.exists() else f"torch.compile needs Python's headers, and {headers} is not there"
