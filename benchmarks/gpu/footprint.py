"""Accuracy of the predicted memory of a GPU, against the GPU of this machine.

    python -m benchmarks.gpu.footprint --out DIR [--only gpt …] [--precisions bf16 …] [--caps 8 …]

For every workload and precision, runs give the peaks at a few micro-batches and the largest micro-batch under
caps on the allocator. A trace on tensors without memory predicts both before. The result also has the entries
of the allocator for one step (``golden_*.json.gz``, to check the model of the allocator without a GPU), the
growth of the context, and the workspaces of cuBLAS. It is written after every workload, so a run that is cut
short keeps its results. Without a GPU nothing is measured, and the exit code is 0.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import json
import platform
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autobatch.core.errors import AutobatchError
from autobatch.core.units import GiB
from autobatch.device.allocator.caching import CachingAllocator
from autobatch.device.allocator.trace import replay
from autobatch.device.cuda import CudaDevice
from autobatch.footprint.predict import Footprint, footprint, predict, with_workspaces
from autobatch.footprint.trace_step import Setting
from autobatch.probing.attempt import ATTEMPT_STEPS, TrainSetup, attempt
from autobatch.probing.limits import ReplayPredictor
from autobatch.probing.search import search
from benchmarks.footprint.table import gpu_summary, gpu_text
from benchmarks.footprint.truth import Onlooker, train
from benchmarks.gpu.cases import CASES, SAMPLES, Made
from benchmarks.gpu.golden import WORKSPACES, lasting, mismatches, reduced

PRECISIONS = ("fp32", "bf16", "fp16")
SIZES = (4, 16, 64, 256)
CAPS_GIB = (8, 16, 24, 40, 80)
GOLDEN = ("gpt", "bf16", 16)
"""The step whose entries are stored."""
HEADROOM_BYTES = 2 * GiB
"""Free memory above a cap, because the context grows and other processes may start."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--precisions", nargs="*", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--caps", nargs="*", type=int, default=list(CAPS_GIB), help="GiB")
    parser.add_argument("--seconds", type=float, default=540.0, help="start nothing after this time")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.gpu.footprint: no CUDA GPU found, nothing was measured")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    content = header()
    for name in options.only:
        for precision in options.precisions:
            if time.perf_counter() - start > options.seconds:
                content["left_out"].append([name, precision])
                continue
            content["workloads"].append(measure(name, precision, options.caps, content["workspaces"]))
            if (name, precision) == GOLDEN[:2]:
                content["golden"] = keep_golden(options.out)
            content["context_bytes"].append(outside_bytes())
            content["wall_seconds"] = round(time.perf_counter() - start)
            content["summary"] = gpu_summary(content["workloads"])
            write(options.out, content)
    print(gpu_text(content))


def header() -> dict[str, Any]:
    """Return the GPU, the versions, and the figures that are measured once."""
    properties = torch.cuda.get_device_properties(0)
    before = outside_bytes()
    return {
        "benchmark": "footprint-gpu",
        "command": "python -m benchmarks.gpu.footprint",
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "total_bytes": properties.total_memory,
        "versions": {
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "python": platform.python_version(),
        },
        "context_bytes": [before],
        "workspaces": workspaces(),
        "golden": None,
        "left_out": [],
        "workloads": [],
        "summary": None,
        "wall_seconds": 0,
    }


def outside_bytes() -> int:
    """Return the bytes outside the allocator of this process: context, kernels and other processes."""
    free, total = torch.cuda.mem_get_info(0)
    return total - free - torch.cuda.memory_reserved(0)


def workspaces() -> dict[str, int]:
    """Return the workspaces that cuBLAS keeps for a product in the forward and in the backward thread."""
    ran = attempt(setup_of("mlp", "fp32", CudaDevice(index=0, memory_budget=8 * GiB)), 4)
    if ran.trace is None:
        return {}
    return {str(size): count for size, count in lasting(ran.trace).items()}


def setup_of(name: str, precision: str, device: CudaDevice) -> TrainSetup:
    case = CASES[name]()
    torch.manual_seed(0)
    return TrainSetup(
        workload=case.workload,
        model=case.workload.model(),
        device=device,
        worst_case=Made(case.batch_of),
        precision=precision,
        max_grad_norm=1.0,
        knobs=case.knobs,
    )


def measure(name: str, precision: str, caps: list[int], found: dict[str, int]) -> dict[str, Any]:
    """Measure one workload in one precision. A failure is part of the result."""
    device = CudaDevice(index=0, memory_budget=None)
    setup = setup_of(name, precision, device)
    row: dict[str, Any] = {"workload": name, "precision": precision, "sizes": [], "limits": [], "notes": []}
    try:
        step = footprint(setting_of(setup))
    except AutobatchError as error:
        return row | {"failure": str(error)}
    row["cpu_estimate_seconds"], row["notes"] = step.seconds, list(step.notes)
    taken = next(((int(size), count) for size, count in found.items()), (WORKSPACES[0], 2))
    for size in SIZES:
        ran = attempt(setup, size).attempt
        if not ran.fits:
            break
        row["sizes"].append(
            {
                "micro_batch": size,
                "predicted": peaks(step, taken, size),
                "gpu": {"allocated": ran.peak_allocated_bytes, "reserved": ran.peak_reserved_bytes},
                "seconds": ran.seconds,
            }
        )
    free, _ = torch.cuda.mem_get_info(0)
    room = free + torch.cuda.memory_reserved(0) - HEADROOM_BYTES
    row["limits"] = [limit(setup, step, taken, cap * GiB) for cap in caps if cap * GiB <= room]
    return row


def setting_of(setup: TrainSetup) -> Setting:
    return Setting(
        workload=setup.workload,
        model=setup.model,
        batch_of=setup.worst_case.batch,
        precision=setup.precision,
        capability=torch.cuda.get_device_capability(0),
        steps=ATTEMPT_STEPS,
        max_grad_norm=1.0,
        knobs=setup.knobs,
    )


def peaks(step: Footprint, taken: tuple[int, int], size: int) -> dict[str, int]:
    found = replay(with_workspaces(step, taken).at(size), CachingAllocator())
    return {"allocated": found.peak_allocated_bytes, "reserved": found.peak_reserved_bytes}


def limit(setup: TrainSetup, step: Footprint, taken: tuple[int, int], cap_bytes: int) -> dict[str, Any]:
    """Return the largest micro-batch under a cap, predicted and found by runs."""
    estimate = predict(step, budget_bytes=cap_bytes, cap=SAMPLES, workspaces=taken)
    gpu = replace(setup, device=CudaDevice(index=0, memory_budget=cap_bytes))
    program = with_workspaces(step, taken)
    predictor = ReplayPredictor(lambda: CachingAllocator(cap_bytes), program)
    true = search(lambda size: attempt(gpu, size), cap=SAMPLES, predictor=predictor)
    return {
        "cap_bytes": cap_bytes,
        "predicted": estimate.micro_batch,
        "predicted_low": estimate.micro_batch_low,
        "predicted_high": estimate.micro_batch_high,
        "gpu": true.micro_batch,
        "upper_bound_by": true.upper_bound_by,
        "runs": len(true.attempts),
        "ooms": sum(not one.fits for one in true.attempts),
    }


def keep_golden(out: Path) -> dict[str, Any]:
    """Store the allocator's entries of one step, and compare the model with them."""
    name, precision, size = GOLDEN
    setup = setup_of(name, precision, CudaDevice(index=0, memory_budget=None))
    with setup.device.enforced():
        train(setup, size, Onlooker())
        snapshot = torch.cuda.memory._snapshot(0)
    entries = reduced(snapshot["device_traces"][0])
    wrong = mismatches(entries)
    content = {
        "workload": name,
        "precision": precision,
        "micro_batch": size,
        "gpu": torch.cuda.get_device_name(0),
        "torch": str(torch.__version__),
        "entries": entries,
    }
    path = out / "golden_allocator.json.gz"
    path.write_bytes(gzip.compress(json.dumps(content).encode(), mtime=0))
    return {"file": path.name, "entries": len(entries), "mismatches": len(wrong), "first": wrong[:3]}


def write(out: Path, content: dict[str, Any]) -> None:
    slug = content["gpu"].lower().replace(" ", "-")
    path = out / f"footprint_{slug}_{content['date']}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
