"""What of a device and a workload decides which knobs apply."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

import torch

from autobatch.core.knobs import TuningContext
from autobatch.core.records import Precision
from autobatch.probing.attempt import TrainSetup
from autobatch.probing.setup import stand_in_optimizers
from autobatch.step.apply_knobs import find_blocks
from autobatch.tuning.timing import fetch_share
from autobatch.workload.contract import Workload
from autobatch.workload.feed import SeededCollate
from autobatch.workload.loader import why_not_sent
from autobatch.workload.nested import tensors_of

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimizers with a fused step on cards and on the CPU."""


def describe_context(
    setup: TrainSetup,
    *,
    precision_is_open: bool,
    micro_batch: int,
    planned_steps: int,
    workers_are_open: bool = True,
) -> TuningContext:
    """Look at what is there.

    Args:
        setup: the device and the workload.
        precision_is_open: no precision was asked for.
        micro_batch: the largest that the plan may use, in samples.
        planned_steps: optimizer steps of the run that is tuned for.
        workers_are_open: no number of loader workers was asked for.
    """
    cores = usable_cores()
    loader = why_not_workers(setup) if workers_are_open else "a number of workers was asked for"
    precisions = native_precisions(setup) if precision_is_open else ()
    others = [one for one in precisions if one != setup.precision]
    return TuningContext(
        device_kind=setup.device.kind,
        precisions=(setup.precision, *others),
        optimizers=implementations(setup.workload, setup.device.kind),
        blocks=len(find_blocks(setup.model)),
        images=any(p.dim() == 4 for p in setup.model.parameters())
        and any(t.dim() == 4 for t in tensors_of(setup.worst_case.batch(2))),
        compiler=why_not_compile(setup.device.kind),
        micro_batch=micro_batch,
        planned_steps=planned_steps,
        cores=cores,
        loader=loader,
        fetch_share=fetch_share(setup, micro_batch) if loader is None and cores > 1 else 0.0,
        segments=setup.device.why_not_expandable(),
    )


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def why_not_workers(setup: TrainSetup) -> str | None:
    """Why loader workers cannot feed a workload; ``None``: they can."""
    workload = setup.workload
    join = SeededCollate(data=workload.train_data, collate=workload.collate, seed=0)
    return why_not_sent(join, setup.worst_case.batch(1))


def native_precisions(setup: TrainSetup) -> tuple[Precision, ...]:
    """What the device computes in without emulation: 16 bits that are slower than 32 are no choice.

    fp16 only where there is no bf16: of the same speed, it needs a loss scale, and overflows sooner.
    """
    if setup.device.kind == "cuda":
        capability = torch.cuda.get_device_capability(setup.device.torch_device)
        if capability >= (8, 0):
            return ("bf16", "fp32")
        return ("fp32", "fp16") if capability >= (7, 0) else ("fp32",)
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    native = any(getattr(torch.cpu, name, lambda: False)() for name in names)
    return ("fp32", "bf16") if native else ("fp32",)


def implementations(workload: Workload, device_kind: str) -> tuple[str, ...]:
    """Implementations of the workload's optimizer that are left to choose, ``default`` first.

    The default is in lists (foreach) on cards, and parameter by parameter elsewhere.
    """
    made = stand_in_optimizers(workload)
    if not made or any(
        one.defaults.get("fused") is not None or one.defaults.get("foreach", True) is not None for one in made
    ):
        return ("default",)
    found = ["default"]
    if device_kind != "cuda":
        found.append("foreach")
    if all(type(one) in FUSED for one in made):
        found.append("fused")
    return tuple(found)


def why_not_compile(device_kind: str) -> str | None:
    """What ``torch.compile`` lacks here; ``None``: nothing."""
    if device_kind == "cuda":
        return None if importlib.util.find_spec("triton") else "torch.compile needs triton on a card"
    compilers = (os.environ.get("CXX"), "g++", "clang++", "c++")
    if not any(name and shutil.which(name) for name in compilers):
        return "torch.compile needs a C++ compiler on the CPU"
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    return None if headers.exists() else f"torch.compile needs Python's headers, and {headers} is not there"
