"""Predicted memory against a GPU: peaks, largest micro-batches, and the allocator entry by entry."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autobatch.core.units import GiB
from autobatch.device.allocator.caching import CachingAllocator
from autobatch.device.allocator.trace import replay
from autobatch.device.base import Device
from autobatch.device.hardware_profile import USUAL_PROCESSORS, Libraries
from autobatch.footprint.predict import Footprint, footprint, predict, program_on
from autobatch.search.replay import Replay
from autobatch.search.search import search
from autobatch.setup.attempt import TrainSetup, attempt
from autobatch.setup.trace import setting_of
from benchmarks.footprint.truth import Onlooker, train
from benchmarks.gpu.cases import SAMPLES, Case, Made
from benchmarks.gpu.golden import WORKSPACES, mismatches, reduced
from benchmarks.gpu.machine import Machine

SIZES = (4, 16, 64, 256)
"""Micro-batches whose peaks are compared."""
TRACED = (2, 8, 16, 31, 32, 48, 64)
"""Micro-batches whose events are compared with each other."""
HEADROOM_BYTES = 2 * GiB
"""Free memory above a cap, because the context grows and other processes may start."""
GOLDEN_FILE = "golden.json.gz"
TRACES_FILE = "traces.jsonl.gz"


def setup_of(case: Case, precision: str, device: Device) -> TrainSetup:
    """Return a setup of a case, whose batches are created at once."""
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


def peaks_and_limits(
    machine: Machine, case: Case, precision: str, caps: Iterable[int] = (), most: int = SAMPLES
) -> dict[str, Any]:
    """Return peaks at a few micro-batches and the limits under caps (bytes), predicted and found by runs."""
    setup = setup_of(case, precision, machine.open())
    step = footprint(setting_of(setup))
    taken = workspaces_of(setup.device)
    row: dict[str, Any] = {"workload": case.workload.name, "precision": precision, "notes": list(step.notes)}
    row |= {"cpu_estimate_seconds": step.seconds, "sizes": [], "limits": []}
    for size in SIZES:
        ran = attempt(setup, size).attempt
        if not ran.fits:
            break
        gpu = {"allocated": ran.peak_allocated_bytes, "reserved": ran.peak_reserved_bytes}
        row["sizes"].append(
            {
                "micro_batch": size,
                "predicted": peaks(step, taken, size),
                "gpu": gpu,
                "seconds": ran.step_seconds,
            }
        )
    room = machine.free_and_total()[0] + machine.reserved() - HEADROOM_BYTES
    for cap in caps:
        if cap <= room:
            row["limits"].append(limit(setup, machine, step, taken, cap, most))
    return row


def workspaces_of(device: Device) -> tuple[int, int]:
    """Return the size and the number of cuBLAS' workspaces (CublasHandlePool.cpp, until torch 2.14)."""
    return (WORKSPACES[1] if (device.compute_capability or (0, 0)) >= (9, 0) else WORKSPACES[0], 2)


def peaks(step: Footprint, taken: tuple[int, int], size: int) -> dict[str, int]:
    """Return the predicted peaks of a micro-batch, in bytes."""
    found = replay(program_on(step, Libraries(taken, USUAL_PROCESSORS)).at(size), CachingAllocator())
    return {"allocated": found.peak_allocated_bytes, "reserved": found.peak_reserved_bytes}


def limit(
    setup: TrainSetup, machine: Machine, step: Footprint, taken: tuple[int, int], cap: int, most: int
) -> dict[str, Any]:
    """Return the largest micro-batch under a cap, predicted and found by runs."""
    budget = machine.budget(cap)
    estimate = predict(step, budget_bytes=budget, cap=most, libraries=Libraries(taken, USUAL_PROCESSORS))
    capped = replace(setup, device=machine.open(budget))
    replay = Replay(lambda: CachingAllocator(budget), program_on(step, Libraries(taken, USUAL_PROCESSORS)))
    true = search(lambda size: attempt(capped, size), cap=most, replay=replay)
    return {
        "cap_bytes": cap,
        "predicted": estimate.micro_batch,
        "predicted_low": estimate.micro_batch_low,
        "predicted_high": estimate.micro_batch_high,
        "gpu": true.micro_batch,
        "upper_bound_by": true.upper_bound_by,
        "runs": len(true.attempts),
        "ooms": sum(not one.fits for one in true.attempts),
    }


def golden(machine: Machine, case: Case, precision: str, size: int, out: Path) -> dict[str, Any]:
    """Store the allocator's entries of one step, and compare the model of the allocator with them."""
    setup = setup_of(case, precision, machine.open())
    machine.empty()
    # `training` records nothing for itself, and the cache is empty.
    with setup.device.training(), machine.recorded() as entries:
        train(setup, size, Onlooker())
        seen = reduced(entries())
    wrong = mismatches(seen)
    content = machine.about() | {
        "workload": case.workload.name,
        "precision": precision,
        "micro_batch": size,
        "entries": seen,
    }
    (out / GOLDEN_FILE).write_bytes(gzip.compress(json.dumps(content).encode(), mtime=0))
    return {
        "file": GOLDEN_FILE,
        "entries": len(seen),
        "mismatches": len(wrong),
        "first": [one._asdict() for one in wrong[:3]],
    }


def traces(machine: Machine, case: Case, precision: str, out: Path) -> dict[str, Any]:
    """Store the events of a step at several micro-batches, and return how they differ.

    ``bent`` has the sizes at 16, 32 and 64 of events that are no straight line through the three.
    """
    setup = setup_of(case, precision, machine.open())
    found: dict[int, Any] = {}
    for size in TRACED:
        trace = attempt(setup, size).trace
        found[size] = None if trace is None else trace.canonical().events
    again = attempt(setup, TRACED[-1]).trace
    lines = [
        {"workload": case.workload.name, "precision": precision, "micro_batch": size, "events": events}
        for size, events in found.items()
        if events is not None
    ]
    with (out / TRACES_FILE).open("ab") as file:  # a gzip file may have several members
        file.write(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode(), mtime=0))
    a, b, c = (found[size] or () for size in (16, 32, 64))
    bent = []
    if len(a) == len(b) == len(c):
        sizes = zip((e[1] for e in a), (e[1] for e in b), (e[1] for e in c), strict=True)
        bent = [(x, y, z) for x, y, z in sizes if x >= 0 and z - y != 2 * (y - x)]
    return {
        "events": {str(size): None if events is None else len(events) for size, events in found.items()},
        "same_twice": again is not None and again.canonical().events == found[TRACED[-1]],
        "alike": len(a) == len(b) == len(c),
        "bent": len(bent),
        "largest_bent": max((z for *_, z in bent), default=0),
        "first_bent": bent[:8],
    }
