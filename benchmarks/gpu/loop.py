"""The training loop on a GPU: its time against a loop written by hand, and waits within a step.

    python -m benchmarks.gpu.loop [--rounds 40] [--share 0.8]

A decoder trains in bf16, with four micro-batches per step of the size that a probe finds in that share of the
GPU. Both loops run in turn, and each step is timed until the GPU has finished it. Then a step of ours runs
while torch raises if the host would wait for the GPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import autobatch
from autobatch import Workload
from autobatch.device.base import Device, Meter
from autobatch.device.select import open_device
from autobatch.step.train_state import build_train_state
from autobatch.step.train_step import accumulate, finish
from autobatch.training.loop import Loop
from autobatch.workload.data import load_micro_batch
from autobatch.workload.nested import feed
from autobatch.workload.order import GlobalBatchSampler
from benchmarks.gpu.tune import VOCABULARY, Decoder
from benchmarks.report import save, surroundings

ACCUMULATION = 4
CLIP = 1.0
LENGTH = 1024
SAMPLES = 4096
WARM = 3


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    ids, labels = batch
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


def workload() -> Workload:
    tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return Workload(
        name="decoder",
        model=Decoder,
        train_data=TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()),
        loss=loss_of,
        optimizer=lambda params, lr: torch.optim.AdamW(params, lr=lr),
        learning_rate=1e-4,
    )


def by_hand(given: Workload, size: int) -> Callable[[], None]:
    gpu = torch.device("cuda", 0)
    model = Decoder().to(gpu)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    order = iter(range(10**9))

    def step() -> None:
        total = torch.zeros((), device=gpu)
        for _ in range(ACCUMULATION):
            first = next(order) * size
            batch = load_micro_batch(given, [(first + i) % SAMPLES for i in range(size)])
            ids, labels = (tensor.to(gpu, non_blocking=True) for tensor in batch)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = loss_of(model, (ids, labels)) / ACCUMULATION
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total.item()

    return step


def by_autobatch(given: Workload, size: int, device: Device, meter: Meter) -> Loop:
    model = Decoder().to(device.torch_device)
    train_state = build_train_state(
        given, model, device.torch_device, precision="bf16", learning_rate=1e-4, max_grad_norm=CLIP
    )
    sampler = GlobalBatchSampler(samples=SAMPLES, target_batch=ACCUMULATION * size, seed=0, steps=10**9)
    return Loop(
        workload=given, train_state=train_state, sampler=sampler, device=device, meter=meter, micro_batch=size
    )


def waits_inside(loop: Loop, size: int) -> str | None:
    """Return the place where the host waits for the GPU in the micro-batches of a step; None if nowhere."""
    batches = [(load_micro_batch(loop.workload, range(size)), size) for _ in range(ACCUMULATION)]
    placed = feed(batches, loop.train_state.device, loop.meter, twice=False)
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


def in_turn(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every step. The contenders take turns in running first."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(-WARM, rounds):
        for name in list(steps)[:: 1 if number % 2 else -1]:
            torch.cuda.synchronize()
            start = time.perf_counter()
            steps[name]()
            torch.cuda.synchronize()
            if number >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--share", type=float, default=0.8)
    options = parser.parse_args()
    given = workload()
    with tempfile.TemporaryDirectory() as home:
        # No saved limit of this machine may answer.
        os.environ["AUTOBATCH_HOME"] = home
        # Two models exist at the same time.
        budget = f"{options.share / 2:.0%}"
        found = autobatch.probe(given, device="cuda:0", memory_budget=budget, max_grad_norm=CLIP)
    size = found.probe.micro_batch
    device = open_device("cuda:0", memory_budget=f"{options.share:.0%}", environ={})
    with device.training() as meter:
        loop = by_autobatch(given, size, device, meter)
        run = loop.run()
        seconds = in_turn({"hand": by_hand(given, size), "autobatch": lambda: next(run)}, options.rounds)
        waits = waits_inside(loop, size)
    ratios = [a / b for a, b in zip(seconds["autobatch"], seconds["hand"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    content = surroundings() | {
        "command": "python -m benchmarks.gpu.loop",
        "micro_batch": size,
        "accumulation": ACCUMULATION,
        "seconds_a_step": {name: statistics.median(own) for name, own in seconds.items()},
        "ratio": middle,
        "quartiles": [low, high],
        "waits_within_a_step": waits,
    }
    content["hardware"]["gpu"] = torch.cuda.get_device_name(0)
    table = (
        f"The loop on {content['hardware']['gpu']}, decoder of 50 M parameters, {LENGTH} tokens, bf16, "
        f"{ACCUMULATION} micro-batches of {size}: {middle:.3f} ({low:.3f} to {high:.3f}) of a loop by hand; "
        f"waits for the GPU within a step: {waits or 'none'}\n"
    )
    print(table)
    print(save("loop-gpu", content, table))


if __name__ == "__main__":
    main()
