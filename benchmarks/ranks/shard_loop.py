"""Time of a step of two ranks that share a model ÷ that of a loop by hand on FSDP2.

    python -m benchmarks.ranks.shard_loop            # prints a table and writes benchmarks/results

Two ranks on the CPU with gloo, four micro-batches of 32 samples each, gradients reduced after each of them or
once per step. The loops run in turns within one process per rank, so that they see the same machine. Wall and
CPU time are medians over the rounds; on a busy machine only the CPU time says something.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from autobatch.core.records.base import ShardSync
from benchmarks.ranks.loop import (
    ACCUMULATION,
    BATCHES,
    MICRO_BATCH,
    MODELS,
    ROUNDS,
    SAMPLES,
    STEPS,
    WORLD,
    in_turn,
    loss,
    micro_batches,
)
from tests.support.rank_server import rank_server
from tests.support.ranked import open_group
from tests.support.sharded_loops import sharded_loop
from tests.support.training import Rows, make_workload

RESULT = Path(__file__).parents[1] / "results" / "ranks-shard-loop_amd-epyc_2026-11-22.json"
SYNCS: tuple[ShardSync, ...] = ("each", "once")


def by_hand(model: nn.Module, data: Rows, rank: int, sync: ShardSync) -> Iterator[None]:
    """Train one step after the other, as the documentation of FSDP2 shows it."""
    for layer in getattr(model[0], "layers", ()):  # type: ignore[index]
        fully_shard(layer)
    root: Any = fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while True:
        optimizer.zero_grad()
        for number, batch in enumerate(micro_batches(data, rank)):
            is_last = number == ACCUMULATION - 1
            root.set_is_last_backward(is_last)
            root.set_requires_gradient_sync(is_last or sync == "each")
            (loss(model, batch) / ACCUMULATION).backward()
        optimizer.step()
        yield


def measure(name: str, sync: ShardSync) -> dict[str, list[tuple[float, float]]]:
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
    steps = (ROUNDS + 1) * STEPS
    shared = sharded_loop(
        group, workload, [MICRO_BATCH] * WORLD, sync=sync, target_batch=SAMPLES, steps=steps
    )
    loops: dict[str, Iterator[Any]] = {
        "by hand": by_hand(build(), data, group.rank, sync),
        "autobatch": shared.run(),
    }
    return in_turn(group, loops)


def main() -> None:
    argparse.ArgumentParser(description=str(__doc__).splitlines()[0]).parse_args()
    results: dict[str, Any] = {"torch": str(torch.__version__), "load": os.getloadavg()[0]}
    with rank_server() as server:
        for name in MODELS:
            results[name] = {}
            for sync in SYNCS:
                rounds = server.values(measure, name, sync, world=WORLD, seconds=200)[0]
                hand, own = (
                    [statistics.median(kind) for kind in zip(*rounds[loop], strict=True)]
                    for loop in ("by hand", "autobatch")
                )
                results[name][sync] = {
                    "by hand, ms of CPU a step": round(1000 * hand[1] / STEPS, 2),
                    "wall": round(own[0] / hand[0], 3),
                    "cpu": round(own[1] / hand[1], 3),
                }
    RESULT.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
