"""Time of a step of two ranks that share a model ÷ that of loops by hand on FSDP2.

    python -m benchmarks.ranks.shard_loop            # prints a table and writes benchmarks/results

Two ranks on the CPU with gloo, micro-batches of 32 samples, four per step and one, gradients reduced after
each of them or once per step. The loops run in turns within one process per rank, so that they see the same
machine. Wall and CPU time are medians over the rounds; on a busy machine only the CPU time says something.

Three loops by hand: as the documentation of FSDP2 shows it; one that clips, and sums its loss over the ranks
for a log, as the loop of autobatch beside it does; and one that keeps the root gathered within a step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from autobatch.core.records import ShardSync
from benchmarks.loop.loops import ACCUMULATION, loss_of
from benchmarks.ranks.loop import (
    MICRO_BATCH,
    MODELS,
    ROUNDS,
    STEPS,
    WORLD,
    cpu_milliseconds,
    on_ranks,
    ratios,
    sgd,
    stream,
    workload_of,
)
from benchmarks.report import arguments, save, surroundings
from tests.support.rank_server import rank_server
from tests.support.ranked import open_group
from tests.support.sharded_loops import sharded_loop

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
    model: nn.Module, data: Iterator[Any], kind: str, *, has_figures: bool = False, keeps_root: bool = False
) -> Callable[[], None]:
    """Train as the documentation of FSDP2 shows it.

    Args:
        model: to shard and train.
        data: the micro-batches.
        kind: of `KINDS`.
        has_figures: also clip, and sum the loss over the ranks.
        keeps_root: keep the parameters of the root gathered until the last backward pass of a step.
    """
    sync, count = KINDS[kind]
    for layer in getattr(model[0], "layers", ()):  # type: ignore[index]
        fully_shard(layer)
    root: Any = fully_shard(model)
    optimizer = sgd(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        total = torch.zeros(())
        for number in range(count):
            is_last = number == count - 1
            root.set_is_last_backward(is_last)
            root.set_requires_gradient_sync(is_last or sync == "each")
            if keeps_root:
                root.set_reshard_after_backward(is_last, recurse=False)
            share = loss_of(model, next(data)) / count
            share.backward()  # type: ignore[no-untyped-call]
            if has_figures:
                total += share.detach()
        if has_figures:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            dist.all_reduce(total)
            float(total)
        optimizer.step()

    return step


def measure(name: str, kind: str) -> dict[str, dict[str, list[float]]]:
    """Return seconds of a step in each round, by loop and clock."""
    torch.set_num_threads(1)
    group = open_group()
    sync, count = KINDS[kind]
    workload = workload_of(name)

    def ours(max_grad_norm: float | None) -> Callable[[], object]:
        loop = sharded_loop(
            group,
            workload,
            [MICRO_BATCH] * WORLD,
            sync=sync,
            target_batch=count * MICRO_BATCH * WORLD,
            steps=(ROUNDS + 1) * STEPS,
            max_grad_norm=max_grad_norm,
        ).run()
        return lambda: next(loop)

    def theirs(**options: bool) -> Callable[[], None]:
        data = stream(workload.train_data, group.rank, count)  # type: ignore[arg-type]
        return by_hand(workload.model(), data, kind, **options)

    plain, logged, kept = COMPARED
    loops = {
        plain: theirs(),
        "autobatch": ours(None),
        logged: theirs(has_figures=True),
        "autobatch, clipped": ours(MAX_NORM),
        kept: theirs(keeps_root=True),
    }
    return on_ranks(group, loops)


def main() -> None:
    """Measure each model in each way, print and save the figures."""
    names = arguments(__doc__, models=[*MODELS]).models
    results = surroundings()
    with rank_server() as server:
        for name in names:
            results[name] = {}
            for kind in KINDS:
                rounds = server.values(measure, name, kind, world=WORLD, seconds=SECONDS)[0]
                results[name][kind] = {
                    hand: {"ms of CPU a step": cpu_milliseconds(rounds[hand])}
                    | ratios(rounds[own], rounds[hand])
                    for hand, own in COMPARED.items()
                }
                print(name, kind, json.dumps(results[name][kind], indent=1), flush=True)
    save("ranks-shard-loop", results)


if __name__ == "__main__":
    main()
