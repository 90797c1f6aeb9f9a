"""Time of a step of two ranks that share a model ÷ that of loops by hand on FSDP2.

    python -m benchmarks.ranks.shard_loop            # prints a table and writes benchmarks/results

Two ranks on the CPU with gloo, micro-batches of 32 samples, four per step and one, gradients reduced after
each of them or once per step. The loops run in turns within one process per rank, so that they see the same
machine. Wall and CPU time are medians over the rounds; on a busy machine only the CPU time says something.

Three loops by hand: as the documentation of FSDP2 shows it; one that clips, and sums its loss over the ranks
for a log, as the loop of autobatch beside it does; and one that keeps the root gathered within a step.
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
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from autobatch.core.records import ShardSync
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
KINDS: dict[str, tuple[ShardSync, int]] = {
    "each": ("each", ACCUMULATION),
    "once": ("once", ACCUMULATION),
    "one micro-batch": ("each", 1),
}
"""Reduction of gradients, and micro-batches of a step."""
COMPARED = {
    "by hand": "autobatch",
    "by hand, clipped, with the loss of all ranks": "autobatch, clipped",
    "by hand, root kept": "autobatch",
}
"""Loops by hand, each with the loop that is compared with it."""
MAX_NORM = 1.0
SECONDS = 600.0


def by_hand(
    model: nn.Module, data: Rows, rank: int, kind: str, *, has_figures: bool = False, keeps_root: bool = False
) -> Iterator[None]:
    """Train one step after the other, as the documentation of FSDP2 shows it.

    Args:
        model: to shard and train.
        data: the samples.
        rank: of this process.
        kind: of `KINDS`.
        has_figures: also clip, and sum the loss over the ranks.
        keeps_root: keep the parameters of the root gathered until the last backward pass of a step.
    """
    sync, count = KINDS[kind]
    for layer in getattr(model[0], "layers", ()):  # type: ignore[index]
        fully_shard(layer)
    root: Any = fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while True:
        optimizer.zero_grad()
        total = torch.zeros(())
        for number, batch in enumerate(micro_batches(data, rank, count)):
            is_last = number == count - 1
            root.set_is_last_backward(is_last)
            root.set_requires_gradient_sync(is_last or sync == "each")
            if keeps_root:
                root.set_reshard_after_backward(is_last, recurse=False)
            share = loss(model, batch) / count
            share.backward()  # type: ignore[no-untyped-call]
            if has_figures:
                total += share.detach()
        if has_figures:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            dist.all_reduce(total)
            float(total)
        optimizer.step()
        yield


def measure(name: str, kind: str) -> dict[str, list[tuple[float, float]]]:
    """Return wall and CPU seconds of each round, by loop."""
    torch.set_num_threads(1)
    group = open_group()
    sync, count = KINDS[kind]
    build, shape = MODELS[name]
    data = Rows(torch.randn(BATCHES * SAMPLES, *shape), torch.randint(10, (BATCHES * SAMPLES,)))
    workload = make_workload(
        model=build,
        train_data=data,
        loss=loss,
        optimizer=lambda params, _: torch.optim.SGD(params, lr=0.01),
    )

    def ours(max_grad_norm: float | None) -> Iterator[Any]:
        return sharded_loop(
            group,
            workload,
            [MICRO_BATCH] * WORLD,
            sync=sync,
            target_batch=count * MICRO_BATCH * WORLD,
            steps=(ROUNDS + 1) * STEPS,
            max_grad_norm=max_grad_norm,
        ).run()

    own = data, group.rank, kind
    plain, logged, kept = COMPARED
    loops = {
        plain: by_hand(build(), *own),
        "autobatch": ours(None),
        logged: by_hand(build(), *own, has_figures=True),
        "autobatch, clipped": ours(MAX_NORM),
        kept: by_hand(build(), *own, keeps_root=True),
    }
    return in_turn(group, loops)


def compare(rounds: dict[str, list[tuple[float, float]]]) -> dict[str, dict[str, float]]:
    """Return the CPU time of each loop by hand, and the ratios of the one beside it."""
    found = {}
    for reference, other in COMPARED.items():
        hand, own = (
            [statistics.median(kind) for kind in zip(*rounds[loop], strict=True)]
            for loop in (reference, other)
        )
        found[reference] = {
            "ms of CPU a step": round(1000 * hand[1] / STEPS, 2),
            "wall": round(own[0] / hand[0], 3),
            "cpu": round(own[1] / hand[1], 3),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(MODELS)}; all if none is given")
    names = parser.parse_args().names
    results: dict[str, Any] = {"torch": str(torch.__version__), "load": os.getloadavg()[0]}
    with rank_server() as server:
        for name in names or MODELS:
            results[name] = {}
            for kind in KINDS:
                rounds = server.values(measure, name, kind, world=WORLD, seconds=SECONDS)[0]
                results[name][kind] = compare(rounds)
                print(name, kind, json.dumps(results[name][kind], indent=1), flush=True)
    if not names:
        RESULT.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
