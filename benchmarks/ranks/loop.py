"""Time of a step over two ranks ÷ that of loops by hand, and of accelerate and Fabric on the same work.

    python -m benchmarks.ranks.loop                  # whole models, against DDP with ``no_sync``
    python -m benchmarks.ranks.loop --shard          # a model that the ranks share, against FSDP2

Two ranks on the CPU with gloo, micro-batches of 32 samples, four per step; with ``--shard`` also one per
step, and gradients reduced after each of them or once per step. The loops run in turns within one process per
rank, so that they see the same machine. Wall and CPU time are medians over the rounds; on a busy machine only
the CPU time says something.

Of FSDP2 there are three loops by hand: as its documentation shows it; one that clips, and sums its loss over
the ranks for a log, as the loop of autobatch beside it does; and one that keeps the root gathered in a step.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from autobatch import Workload
from autobatch.core.records import ShardSync
from autobatch.distributed.group import Group
from benchmarks.loop.loops import ACCUMULATION, loss_of
from benchmarks.loop.peers import accelerated, fabricated
from benchmarks.report import arguments, in_turn, save, surroundings
from tests.support.rank_server import rank_server
from tests.support.ranked import open_group, ranked_loop
from tests.support.sharded_loops import sharded_loop
from tests.support.training import Rows, make_workload

MICRO_BATCH, WORLD = 32, 2
ROUNDS, STEPS = 30, 3
BATCHES = 16
"""Batches of an epoch."""
SAMPLES = ACCUMULATION * MICRO_BATCH * WORLD
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
        train_data=Rows(torch.randn(BATCHES * SAMPLES, *shape), torch.randint(10, (BATCHES * SAMPLES,))),
        loss=loss_of,
        optimizer=lambda parameters, _: sgd(parameters),
    )


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def stream(data: Rows, rank: int, count: int = ACCUMULATION) -> Iterator[Any]:
    """Yield the collated micro-batches of a rank, the same ones for each step."""
    own = range(rank * SAMPLES // WORLD, (rank + 1) * SAMPLES // WORLD)
    while True:
        for number in range(count):
            ids = own[number * MICRO_BATCH : (number + 1) * MICRO_BATCH]
            yield torch.utils.data.default_collate([data[index] for index in ids])


def by_ddp(model: nn.Module, data: Iterator[Any]) -> Callable[[], None]:
    """Train as the documentation of DDP shows it."""
    ddp = DistributedDataParallel(model)
    optimizer = sgd(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        for number in range(ACCUMULATION):
            with nullcontext() if number == ACCUMULATION - 1 else ddp.no_sync():
                (loss_of(ddp, next(data)) / ACCUMULATION).backward()
        optimizer.step()

    return step


def by_fsdp(
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


def fabric() -> Any:
    from lightning.fabric import Fabric

    found = Fabric(accelerator="cpu", devices=WORLD, strategy="ddp")
    found.launch()
    return found


def measure(name: str) -> dict[str, dict[str, list[float]]]:
    """Return seconds of a step in each round, by loop and clock."""
    torch.set_num_threads(1)
    group = open_group()
    workload = workload_of(name)

    def data() -> Iterator[Any]:
        return stream(workload.train_data, group.rank)  # type: ignore[arg-type]

    def model() -> tuple[nn.Module, torch.optim.Optimizer]:
        made = workload.model()
        return made, sgd(made.parameters())

    steps = (ROUNDS + 1) * STEPS
    loop = ranked_loop(group, workload, [MICRO_BATCH] * WORLD, target_batch=SAMPLES, steps=steps).run()
    loops = {
        "by hand": by_ddp(workload.model(), data()),
        "accelerate": accelerated(*model(), data()),
        "Fabric": fabricated(fabric(), *model(), data()),
        "autobatch": lambda: next(loop),
    }
    return on_ranks(group, loops)


def on_ranks(group: Group, loops: Mapping[str, Callable[[], object]]) -> dict[str, dict[str, list[float]]]:
    """Run loops on all ranks in turn, after a round that warms up."""

    def meet() -> None:
        group.agree(False)

    in_turn(loops, 1, STEPS, before=meet)
    found = in_turn(loops, ROUNDS, STEPS, before=meet)
    group.close()
    return found


def ratios(own: Mapping[str, Sequence[float]], hand: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the medians of a loop ÷ those of one by hand, by clock."""
    return {clock: round(statistics.median(own[clock]) / statistics.median(hand[clock]), 3) for clock in own}


def cpu_milliseconds(loop: Mapping[str, Sequence[float]]) -> float:
    """Return the median CPU time of a step."""
    return round(1000 * statistics.median(loop["cpu"]), 2)


def measure_shared(name: str, kind: str) -> dict[str, dict[str, list[float]]]:
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
        return by_fsdp(workload.model(), data, kind, **options)

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
    """Measure each model, print and save the figures."""
    given = arguments(__doc__, models=[*MODELS], shard=False)
    results = surroundings("accelerate", "lightning")
    with rank_server() as server:
        for name in given.models:
            if not given.shard:
                rounds = server.values(measure, name, world=WORLD, seconds=SECONDS)[0]
                hand = rounds.pop("by hand")
                results[name] = {"by hand, ms of CPU a step": cpu_milliseconds(hand)}
                results[name] |= {other: ratios(own, hand) for other, own in rounds.items()}
                continue
            results[name] = {}
            for kind in KINDS:
                rounds = server.values(measure_shared, name, kind, world=WORLD, seconds=SECONDS)[0]
                results[name][kind] = {
                    hand: {"ms of CPU a step": cpu_milliseconds(rounds[hand])}
                    | ratios(rounds[own], rounds[hand])
                    for hand, own in COMPARED.items()
                }
    print(json.dumps(results, indent=1))
    save("ranks-shard-loop" if given.shard else "ranks-loop", results)


if __name__ == "__main__":
    main()
