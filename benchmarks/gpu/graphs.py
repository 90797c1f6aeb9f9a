"""Steps of several micro-batches with compiled code and CUDA graphs, beside the same steps without."""

from __future__ import annotations

import time
from typing import Any

import torch

from autobatch import Workload
from autobatch.core.knobs import COMPILE, COMPILE_MODES
from autobatch.core.units import GiB
from autobatch.step.apply_knobs import free_graphs
from autobatch.step.train_state import StepSettings, build_train_state
from autobatch.step.train_step import train_step
from autobatch.workload.data import load_micro_batch
from autobatch.workload.nested import feed
from benchmarks.gpu.machine import Machine

STEPS, MICRO_BATCHES = 6, 3
"""The first steps compile and record; three micro-batches have to share their gradients."""


def steps_of_modes(machine: Machine, given: Workload, size: int) -> dict[str, Any]:
    """Return the losses, the seconds of the last step and the memory of each mode of the compiler."""
    found: dict[str, Any] = {}
    # Compiling for the CPU takes longer than a rehearsal.
    for mode in COMPILE_MODES if machine.is_real else COMPILE_MODES[:1]:
        try:
            found[mode] = steps(machine, given, size, mode)
        except Exception as error:  # the other modes are measured
            found[mode] = f"{type(error).__name__}: {error}"[:500]
        free_graphs()
        machine.empty()
    return found


def steps(machine: Machine, given: Workload, size: int, mode: str) -> dict[str, Any]:
    """Train a few steps, always on the same samples."""
    device = machine.open(machine.budget(64 * GiB))
    batches = [(load_micro_batch(given, range(n * size, (n + 1) * size)), size) for n in range(MICRO_BATCHES)]
    losses, seconds = [], 0.0
    with device.training() as meter:
        torch.manual_seed(0)
        model = given.model().to(device.torch_device)
        settings = StepSettings(precision="fp32", knobs={COMPILE: mode})
        state = build_train_state(
            given, model, device.torch_device, settings, learning_rate=given.learning_rate
        )
        for _ in range(STEPS):
            machine.synchronize()
            start = time.perf_counter()
            placed = feed(batches, device.torch_device, meter, twice=False)
            losses.append(train_step(state, placed, MICRO_BATCHES * size).loss)
            machine.synchronize()
            seconds = time.perf_counter() - start
    return {"losses": losses, "seconds": seconds, "reserved_bytes": machine.reserved()}


def largest_difference(found: dict[str, Any], mode: str) -> float:
    """Return the largest relative difference of a mode's losses from those without the compiler."""
    pairs = zip(found["off"]["losses"], found[mode]["losses"], strict=True)
    return max(abs(one - other) / max(abs(one), 1e-9) for one, other in pairs)
