"""The speed of training on a GPU: against a loop written by hand, and tuned."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

import autobatch
from autobatch import Workload
from benchmarks.gpu.device import GPU, NAME, empty
from benchmarks.gpu.workloads import CASES

ACCUMULATION, WARM = 4, 3
BF16 = torch.bfloat16


def loop(way: str, name: str, size: int, rounds: int) -> dict[str, Any]:
    """Return the median seconds of a step in a loop of autobatch and in one by hand, and their ratio."""
    case = CASES[name]
    ours = median(WAYS[way](case.make(), size, rounds, case.options))
    empty()
    hand = median(timed(by_hand(case.make(), size), rounds))
    seconds = {"autobatch": ours, "hand": hand}
    return {"workload": name, "way": way, "micro_batch": size, "seconds": seconds, "ratio": ours / hand}


def by_fit(work: Workload, size: int, rounds: int, options: dict[str, Any]) -> list[float]:
    """Return the seconds of the steps of `autobatch.fit`."""
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        autobatch.fit(
            work, device=NAME, target_batch=ACCUMULATION * size, max_micro_batch=size, steps=WARM + rounds,
            trials=0, max_grad_norm=1.0, split_check="off", out=folder, progress=False,
            until=lambda record: seconds.append(record.seconds), **options,
        )  # fmt: skip
    return seconds[WARM:]


def by_batches(work: Workload, size: int, rounds: int, options: dict[str, Any]) -> list[float]:
    """Return the seconds of the steps of a loop with `autobatch.batches`."""
    counts = {"target_batch": ACCUMULATION * size, "max_micro_batch": size}
    plan = autobatch.plan(work, device=NAME, split_check="off", progress=False, **counts, **options)
    model = work.model().to(GPU)
    optimizer = work.optimizer(model.parameters(), work.learning_rate)
    batches = iter(autobatch.batches(work, plan, steps=WARM + rounds, optimizer=optimizer))

    def step() -> None:
        batch = next(batches)
        for micro in batch:
            placed = [tensor.pin_memory().to(GPU, non_blocking=True) for tensor in micro.data]
            with torch.autocast(GPU.type, dtype=BF16):
                loss = work.loss(model, placed)
            batch.backward(loss)
        batch.step(max_grad_norm=1.0)

    return timed(step, rounds)


WAYS = {"fit": by_fit, "batches": by_batches}


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
            with torch.autocast(GPU.type, dtype=BF16):
                loss = work.loss(model, placed) / ACCUMULATION
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total.item()

    return step


def timed(step: Callable[[], object], rounds: int) -> list[float]:
    """Return the seconds of every step after the first ones, each waited for."""
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
    case, limits = CASES[name], {"trials": trials, "timeout": seconds}
    options = {"device": NAME, "target_batch": target, "progress": False, **limits, **case.options}
    found = autobatch.tune(case.make(), **options).tuning
    assert found is not None
    return {"workload": name, "best": found.best, "gain": found.low, "trials": found.trials}
