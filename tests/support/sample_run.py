"""A sample run with every part that a report can have."""

from __future__ import annotations

import math
from typing import Any

from autobatch import Probe, StepRecord, Training
from autobatch.core.records import (
    Attempt,
    DeviceRecord,
    Estimate,
    LrTrial,
    LrTuning,
    MemoryCurve,
    MemoryHolder,
    RunRecord,
    Trial,
    Tuning,
)
from autobatch.core.units import GiB, MiB
from autobatch.planning import make_plan


def a_device(**changes: Any) -> DeviceRecord:
    fields: dict[str, Any] = {
        "kind": "cuda",
        "name": "NVIDIA GeForce RTX 4090",
        "total_bytes": 24201 * MiB,
        "budget_bytes": 6 * GiB,
        "budget_source": "set by --memory-budget 6GiB, without headroom",
        "other_processes_bytes": 3 * GiB + 311 * MiB,
        "holders": [
            MemoryHolder(pid=4312, name="/usr/bin/python3 -m notebook", used_bytes=3 * GiB),
            MemoryHolder(pid=None, name=None, used_bytes=311 * MiB),
        ],
        "notes": ["NVML found the GPU by its UUID", "2 processes of other users have no name here"],
    }
    return DeviceRecord(**(fields | changes))


def an_attempt(size: int, *, fits: bool) -> Attempt:
    needs = (1200 + 51 * size) * MiB
    return Attempt(
        micro_batch=size,
        fits=fits,
        peak_allocated_bytes=int(needs * 0.94) if fits else None,
        peak_reserved_bytes=needs if fits else None,
        seconds=0.2 + size / 400,
        reason=None if fits else "CUDA out of memory. Tried to allocate 512.00 MiB",
        phase=None if fits else "backward",
    )


def a_probe() -> Probe:
    return Probe(
        micro_batch=93,
        limited_by="memory",
        upper_bound_by="run",
        predicted_micro_batch=97,
        oom_count=2,
        attempts=[an_attempt(size, fits=size <= 93) for size in (1, 8, 64, 93, 94, 97)],
    )


def a_step(step: int, **changes: Any) -> StepRecord:
    seconds = 0.56 + 0.02 * math.sin(step / 3) + (0.4 if step == 41 else 0.0)
    fields: dict[str, Any] = {
        "step": step,
        "applied": True,
        "samples": 1024 * step,
        "loss": 0.35 + 2.1 * math.exp(-step / 22) + 0.06 * math.sin(step * 1.7),
        "count": 1024.0,
        "learning_rate": 3e-4 * min(step / 12, 1) * (0.5 + 0.5 * math.cos(math.pi * step / 120)),
        "grad_norm": 1.5,
        "micro_batch": 86 if step < 41 else 64,
        "accumulation_steps": 12 if step < 41 else 16,
        "seconds": seconds,
        "peak_allocated_bytes": 5 * GiB,
        "peak_reserved_bytes": 5 * GiB,
        "samples_per_s": 1024 / seconds,
        "oom_recoveries": int(step >= 41),
        "recovered": "CUDA out of memory. Tried to allocate 96.00 MiB" if step == 41 else None,
    }
    return StepRecord(**(fields | changes))


def a_memory_curve() -> MemoryCurve:
    forward = [min(at, 120 - at) * 65 * MiB for at in range(121)]
    return MemoryCurve(
        positions=[float(at) for at in range(121)],
        categories={"parameters": [400 * MiB] * 121, "activations": forward},
        phases={"forward": 0.0, "backward": 60.0, "optimizer": 116.0},
        modules={
            "embedding": [size // 3 for size in forward],
            "body.0 … 3": [size // 3 * 2 for size in forward],
        },
        micro_batch=93,
    )


def some_rates() -> LrTuning:
    losses = {3e-4: 1.31, 4.8e-3: None, 9e-4: 1.1}
    tried = enumerate(losses.items())
    return LrTuning(
        trials=3, steps=40, default=3e-4, best=9e-4, default_loss=1.31, best_loss=1.1,
        history=[LrTrial(number=number, learning_rate=rate, loss=loss) for number, (rate, loss) in tried],
    )  # fmt: skip


def a_run(**changes: Any) -> RunRecord:
    trials = [
        Trial(number=at, samples_per_s=1500.0 + 90 * at, is_faster=at == 1, parameters={"workers": at})
        for at in range(4)
    ]
    fields: dict[str, Any] = {
        "device": a_device(),
        "probe": a_probe(),
        "plan": make_plan(target_batch=1024, micro_batch_limit=93, learning_rate=3e-4, precision="bf16"),
        "tuning": Tuning(
            trials=13,
            best={"compile": "default", "workers": 3},
            changes={"compile": "default"},
            baseline_samples_per_s=1500.0,
            best_samples_per_s=1728.4,
            low=1.11,
            offers=["bf16 is at least 1.80 × faster here: add --precision bf16"],
            study="resnet-18-4f1c",
            history=[*trials, Trial(number=12, note="over the budget by 4 %")],
            learning_rate=some_rates(),
        ),
        "training": Training(
            optimizer_steps=120,
            samples=122880,
            samples_per_s=1824.3,
            first_loss=2.4212,
            final_loss=0.3618,
            oom_recoveries=1,
            resumed_from=None,
            checkpoint="runs/resnet-18/2026-11-21/checkpoints/step-120.pt",
            seconds=67.4,
            validation={"accuracy": 0.9312},
            micro_batch=64,
        ),
        "metrics": [a_step(step) for step in range(1, 121)],
        "checkpoints": [40, 80, 120],
        "memory_curve": a_memory_curve(),
        "versions": {"autobatch": "0.1.0", "python": "3.12.4", "torch": "2.13.0+cu130", "driver": "580.95"},
        "command": "autobatch fit train.py:workload --target-batch 1024 --memory-budget 6GiB --steps 120",
        "title": "train.py:workload",
        "created": "2026-11-21 14:05 UTC",
    }
    return RunRecord(**(fields | changes))


def an_estimate(**changes: Any) -> Estimate:
    known: dict[str, Any] = {
        "profile": "rtx-4090", "budget_bytes": 22 * GiB, "budget_source": "", "precision": "bf16",
        "micro_batch": 90, "micro_batch_low": 86, "micro_batch_high": 93, "fits": True,
        "peak_allocated_bytes": 20 * GiB, "peak_reserved_bytes": 21 * GiB, "seconds": 0.1,
        "plan": make_plan(target_batch=1024, micro_batch_limit=90, learning_rate=0.1),
        "memory": {}, "modules": {}, "phase": "backward",
    }  # fmt: skip
    return Estimate(**(known | changes))
