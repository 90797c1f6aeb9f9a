"""The speed of training on a GPU: against a loop written by hand, and tuned."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

import autobatch
from autobatch import Progress, StepRecord, Workload
from benchmarks.gpu.device import GPU, NAME, empty
from benchmarks.gpu.workloads import CASES

ACCUMULATION = 4
WARM = 3


class Seconds(Progress):
    """The duration of every step."""

    def __init__(self) -> None:
        self.steps: list[float] = []

    def stepped(self, step: StepRecord, of: int) -> None:
        self.steps.append(step.seconds)


def loop(name: str, size: int, rounds: int) -> dict[str, Any]:
    """Return seconds per step of `autobatch.fit` and of a loop written by hand, and their ratio."""
    case, seconds = CASES[name], Seconds()
    with tempfile.TemporaryDirectory() as folder:
        autobatch.fit(
            case.make(),
            device=NAME,
            target_batch=ACCUMULATION * size,
            max_micro_batch=size,
            steps=WARM + rounds,
            trials=0,
            max_grad_norm=1.0,
            split_check="off",
            out=folder,
            progress=seconds,
            **case.options,
        )
    ours = seconds.steps[WARM:]
    empty()
    hand = timed(by_hand(case.make(), size), rounds)
    return {
        "workload": name,
        "micro_batch": size,
        "accumulation": ACCUMULATION,
        "seconds_a_step": {"autobatch": statistics.median(ours), "hand": statistics.median(hand)},
        "ratio": statistics.median(ours) / statistics.median(hand),
    }


def by_hand(work: Workload, size: int) -> Callable[[], None]:
    """Return a step as people write it: pinned copies, autocast, one clip, one read of the loss."""
    model = work.model().to(GPU)
    optimizer = work.optimizer(model.parameters(), work.learning_rate)
    order = iter(range(10**9))

    def step() -> None:
        total = torch.zeros((), device=GPU)
        for _ in range(ACCUMULATION):
            first = next(order) * size
            batch = default_collate([work.train_data[first + number] for number in range(size)])
            placed = [tensor.pin_memory().to(GPU, non_blocking=True) for tensor in batch]
            with torch.autocast(GPU.type, dtype=torch.bfloat16):
                loss = work.loss(model, placed) / ACCUMULATION
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total.item()

    return step


def timed(step: Callable[[], object], rounds: int) -> list[float]:
    """Return the seconds of every step, each waited for."""
    seconds = []
    for _ in range(WARM + rounds):
        torch.cuda.synchronize(GPU)
        start = time.perf_counter()
        step()
        torch.cuda.synchronize(GPU)
        seconds.append(time.perf_counter() - start)
    return seconds[WARM:]


def tuned(name: str, target: int, trials: int, seconds: float) -> dict[str, Any]:
    """Tune, and return what it gains over every knob at its default."""
    case = CASES[name]
    found = autobatch.tune(
        case.make(),
        device=NAME,
        target_batch=target,
        trials=trials,
        timeout=seconds,
        progress=False,
        **case.options,
    ).tuning
    assert found is not None
    return {
        "workload": name,
        "target_batch": target,
        "best": found.best,
        "gain": found.low,
        "trials": found.trials,
    }
