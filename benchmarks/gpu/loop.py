"""The training loop on a GPU: its time against a loop written by hand, and waits within a step.

A model trains in bf16, with four micro-batches per step. Both loops run in turn, and each step is timed until
the GPU has finished it. Then a step of ours runs while torch raises if the host would wait for the GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autobatch import Workload
from autobatch.core.units import GiB
from autobatch.device.base import Device, Meter
from autobatch.step.train_state import StepSettings, build_train_state
from autobatch.step.train_step import accumulate, finish
from autobatch.training.loop import Loop
from autobatch.workload.data import load_micro_batch
from autobatch.workload.nested import feed
from autobatch.workload.order import GlobalBatchSampler
from benchmarks.gpu.machine import Machine

ACCUMULATION = 4
CLIP = 1.0
WARM = 3


def ratio(machine: Machine, given: Workload, size: int, rounds: int) -> dict[str, Any]:
    """Return seconds per step of both loops, and the quartiles of their ratio."""
    device = machine.open(machine.budget(64 * GiB))
    with device.training() as meter:
        loop = by_autobatch(given, size, device, meter)
        run = loop.run()
        steps = {"hand": by_hand(machine, given, size), "autobatch": lambda: next(run)}
        seconds = in_turn(machine, steps, rounds)
        waits = waits_inside(loop, size) if machine.is_real else None
        run.close()
    ratios = [ours / hand for ours, hand in zip(seconds["autobatch"], seconds["hand"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "workload": given.name,
        "micro_batch": size,
        "accumulation": ACCUMULATION,
        "rounds": rounds,
        "seconds_a_step": {name: statistics.median(own) for name, own in seconds.items()},
        "ratio": middle,
        "quartiles": [low, high],
        "waits_within_a_step": waits,
    }


def by_hand(machine: Machine, given: Workload, size: int) -> Callable[[], None]:
    """Return a step as people write it: pinned copies, autocast, one clip, one read of the loss."""
    device = machine.torch_device
    samples = len(given.train_data)
    model = given.model().to(device)
    optimizer = given.optimizer(model.parameters(), given.learning_rate)
    order = iter(range(10**9))

    def step() -> None:
        total = torch.zeros((), device=device)
        for _ in range(ACCUMULATION):
            first = next(order) * size
            batch = load_micro_batch(given, [(first + i) % samples for i in range(size)])
            if machine.is_real:
                batch = [tensor.pin_memory() for tensor in batch]
            placed = tuple(tensor.to(device, non_blocking=True) for tensor in batch)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = given.loss(model, placed) / ACCUMULATION
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total.item()

    return step


def by_autobatch(given: Workload, size: int, device: Device, meter: Meter) -> Loop:
    """Return our loop over the same data."""
    model = given.model().to(device.torch_device)
    train_state = build_train_state(
        given,
        model,
        device.torch_device,
        StepSettings(precision="bf16", max_grad_norm=CLIP),
        learning_rate=given.learning_rate,
    )
    sampler = GlobalBatchSampler(
        samples=len(given.train_data), target_batch=ACCUMULATION * size, seed=0, steps=10**9
    )
    return Loop(
        workload=given, train_state=train_state, sampler=sampler, device=device, meter=meter, micro_batch=size
    )


def waits_inside(loop: Loop, size: int) -> str | None:
    """Return the place where the host waits for the GPU in the micro-batches of a step; None if nowhere."""
    batches = [(load_micro_batch(loop.workload, range(size)), size) for _ in range(ACCUMULATION)]
    placed = list(feed(batches, loop.train_state.device, loop.meter, twice=False))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        accumulator = accumulate(loop.train_state, placed, ACCUMULATION * size, loop.meter.mark)
    except RuntimeError as error:
        loop.train_state.gradients.clear()
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    finish(loop.train_state, accumulator, mark=loop.meter.mark)
    return None


def in_turn(machine: Machine, steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every step. The contenders take turns in running first."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(-WARM, rounds):
        for name in list(steps)[:: 1 if number % 2 else -1]:
            machine.synchronize()
            start = time.perf_counter()
            steps[name]()
            machine.synchronize()
            if number >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds
