"""Time of a step over two ranks, and of accelerate and Fabric, ÷ that of a DDP loop by hand with ``no_sync``.

    python -m benchmarks.ranks.loop            # prints a table and writes benchmarks/results

Two ranks on the CPU with gloo, four micro-batches of 32 samples each. The loops run in turns within one
process per rank, so that they see the same machine. Wall and CPU time are medians over the rounds; on a busy
machine only the CPU time says something.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from autobatch.distributed.group import Group
from tests.support.rank_server import rank_server
from tests.support.ranked import open_group, ranked_loop
from tests.support.training import Rows, make_workload

ACCUMULATION, MICRO_BATCH, WORLD = 4, 32, 2
ROUNDS, STEPS = 30, 3
BATCHES = 16
"""Batches of an epoch."""
SAMPLES = ACCUMULATION * MICRO_BATCH * WORLD
RESULT = Path(__file__).parents[1] / "results" / "ranks-loop_amd-epyc_2026-11-22.json"


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    return nn.Sequential(
        nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), Pool(), nn.Linear(64, 10)
    )


class Pool(nn.Module):
    """Mean over the positions."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.mean(1)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP": (mlp, (64,)),
    "transformer of 4 layers": (transformer, (16, 64)),
}


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def by_hand(model: nn.Module, data: Rows, rank: int) -> Iterator[None]:
    """Train one step after the other, as the documentation of DDP shows it."""
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while True:
        optimizer.zero_grad()
        for number, batch in enumerate(micro_batches(data, rank)):
            with nullcontext() if number == ACCUMULATION - 1 else ddp.no_sync():
                (loss(ddp, batch) / ACCUMULATION).backward()
        optimizer.step()
        yield


def with_accelerate(model: nn.Module, data: Rows, rank: int) -> Iterator[None]:
    """Train as the documentation of accelerate shows it."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    while True:
        for batch in micro_batches(data, rank):
            with accelerator.accumulate(model):
                accelerator.backward(loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
        yield


def with_fabric(model: nn.Module, data: Rows, rank: int) -> Iterator[None]:
    """Train as the documentation of Lightning Fabric shows it."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=WORLD, strategy="ddp")
    fabric.launch()
    found = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    model, optimizer = found
    while True:
        for number, batch in enumerate(micro_batches(data, rank)):
            with fabric.no_backward_sync(model, enabled=number < ACCUMULATION - 1):
                fabric.backward(loss(model, batch) / ACCUMULATION)
        optimizer.step()
        optimizer.zero_grad()
        yield


def micro_batches(data: Rows, rank: int, count: int = ACCUMULATION) -> Iterator[Any]:
    """Yield the collated micro-batches of a step of a rank."""
    own = range(rank * SAMPLES // WORLD, (rank + 1) * SAMPLES // WORLD)
    for number in range(count):
        ids = own[number * MICRO_BATCH : (number + 1) * MICRO_BATCH]
        yield torch.utils.data.default_collate([data[index] for index in ids])


def measure(name: str) -> dict[str, list[tuple[float, float]]]:
    """Return wall and CPU seconds of each round, by loop."""
    torch.set_num_threads(1)
    group = open_group()
    build, shape = MODELS[name]
    data = Rows(torch.randn(BATCHES * SAMPLES, *shape), torch.randint(10, (BATCHES * SAMPLES,)))
    workload = make_workload(
        model=build,
        train_data=data,
        loss=loss,
        optimizer=lambda params, _: torch.optim.SGD(params, lr=0.01),
    )
    loops: dict[str, Iterator[Any]] = {"by hand": by_hand(build(), data, group.rank)}
    for other, start in (("accelerate", with_accelerate), ("Fabric", with_fabric)):
        loops[other] = start(build(), data, group.rank)
    steps = (ROUNDS + 1) * STEPS
    loop = ranked_loop(group, workload, [MICRO_BATCH] * WORLD, target_batch=SAMPLES, steps=steps)
    loops["autobatch"] = loop.run()
    return in_turn(group, loops)


def in_turn(group: Group, loops: Mapping[str, Iterator[Any]]) -> dict[str, list[tuple[float, float]]]:
    """Run loops on all ranks, a few steps of each in turn; return wall and CPU seconds of each round."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    for number in range(ROUNDS + 1):
        for name, loop in loops.items():
            group.agree(False)
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(STEPS):
                next(loop)
            if number:  # the first round warms up
                found[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    group.close()
    return found


def main() -> None:
    argparse.ArgumentParser(description=str(__doc__).splitlines()[0]).parse_args()
    results: dict[str, Any] = {"torch": str(torch.__version__), "load": os.getloadavg()[0]}
    with rank_server() as server:
        for name in MODELS:
            rounds = server.values(measure, name, world=WORLD, seconds=200)[0]
            hand = [statistics.median(kind) for kind in zip(*rounds["by hand"], strict=True)]
            results[name] = {"by hand, ms of CPU a step": round(1000 * hand[1] / STEPS, 2)}
            for other in ("autobatch", "accelerate", "Fabric"):
                wall, cpu = (statistics.median(kind) for kind in zip(*rounds[other], strict=True))
                results[name][other] = {"wall": round(wall / hand[0], 3), "cpu": round(cpu / hand[1], 3)}
    RESULT.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
