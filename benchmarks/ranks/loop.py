"""Time of a step over two ranks ÷ that of loops by hand.

    python -m benchmarks.ranks.loop                  # whole models, against DDP with ``no_sync``
    python -m benchmarks.ranks.loop --shard          # a model that the ranks share, against FSDP2

Two ranks on the CPU with gloo, four micro-batches of 32 samples per step. The loops run in turns within one
process per rank, so that they see the same machine. Wall and CPU time are medians over the rounds; on a busy
machine only the CPU time says something. Both FSDP2 loops clip the gradient norm.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from autobatch import Workload
from autobatch.distributed.group import Group
from benchmarks.loop.work import ACCUMULATION, loss_of
from benchmarks.report import arguments, in_turn
from tests.support.rank_server import rank_server
from tests.support.ranked import open_group, ranked_loop
from tests.support.sharded_loops import sharded_loop
from tests.support.training import Rows, make_workload

MICRO_BATCH, WORLD, STEPS, MAX_NORM, SECONDS = 32, 2, 3, 1.0, 600.0
SAMPLES = ACCUMULATION * MICRO_BATCH * WORLD
"""Samples of a step."""


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return nn.Sequential(body, nn.AdaptiveAvgPool2d((1, None)), nn.Flatten(), nn.Linear(64, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP": (mlp, (64,)),
    "transformer of 4 layers": (transformer, (16, 64)),
}


def workload_of(name: str) -> Workload:
    """Return a model with samples for some batches."""
    build, shape = MODELS[name]
    return make_workload(
        model=build,
        train_data=Rows(torch.randn(16 * SAMPLES, *shape), torch.randint(10, (16 * SAMPLES,))),
        loss=loss_of,
        optimizer=lambda parameters, _: torch.optim.SGD(parameters, lr=0.01),
    )


def by_hand(workload: Workload, rank: int, *, shard: bool) -> Callable[[], None]:
    """Train as the documentation of DDP or FSDP2 shows it."""
    model: Any = workload.model()
    if shard:
        for block in model[0].layers if isinstance(model[0], nn.TransformerEncoder) else ():
            fully_shard(block)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows: Any = workload.train_data

    def micro_batches() -> Iterator[Any]:
        own = range(rank * SAMPLES // WORLD, (rank + 1) * SAMPLES // WORLD)
        for start in range(0, len(own), MICRO_BATCH):
            ids = own[start : start + MICRO_BATCH]
            yield torch.utils.data.default_collate([rows[index] for index in ids])

    def step() -> None:
        optimizer.zero_grad()
        for number, batch in enumerate(micro_batches(), 1):
            with nullcontext() if shard or number == ACCUMULATION else model.no_sync():
                (loss_of(model, batch) / ACCUMULATION).backward()
        if shard:
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()

    return step


def by_autobatch(group: Group, workload: Workload, *, shard: bool) -> Callable[[], None]:
    """Train by the loop of the package."""
    options: dict[str, Any] = {"target_batch": SAMPLES, "steps": 10**6}
    if shard:
        options["max_grad_norm"] = MAX_NORM
    loop = (sharded_loop if shard else ranked_loop)(group, workload, [MICRO_BATCH] * WORLD, **options)
    records = loop.run()
    return lambda: next(records) and None


def time_steps(name: str, shard: bool, rounds: int) -> dict[str, float]:
    """Return the median of a step of autobatch ÷ that of a step by hand, by clock."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    group, workload = open_group(), workload_of(name)
    steps = {
        "by hand": by_hand(workload, group.rank, shard=shard),
        "autobatch": by_autobatch(group, workload, shard=shard),
    }

    def meet() -> None:
        group.agree(False)

    in_turn(steps, 1, STEPS, before=meet)
    found = in_turn(steps, rounds, STEPS, before=meet)
    group.close()
    own, hand = found["autobatch"], found["by hand"]
    return {clock: round(statistics.median(own[clock]) / statistics.median(hand[clock]), 3) for clock in own}


def main() -> None:
    """Print a line of JSON for each model."""
    given = arguments(__doc__, shard=False, rounds=30)
    with rank_server() as server:
        for name in MODELS:
            found = server.values(time_steps, name, given.shard, given.rounds, world=WORLD, seconds=SECONDS)
            print(json.dumps({"model": name, "shard": given.shard, **found[0]}))


if __name__ == "__main__":
    main()
