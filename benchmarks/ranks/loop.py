"""Time of a step over two ranks, and of accelerate and Fabric, ÷ that of a DDP loop by hand with ``no_sync``.

    python -m benchmarks.ranks.loop            # prints a table and writes benchmarks/results

Two ranks on the CPU with gloo, four micro-batches of 32 samples each. The loops run in turns within one
process per rank, so that they see the same machine. Wall and CPU time are medians over the rounds; on a busy
machine only the CPU time says something.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autobatch import Workload
from autobatch.distributed.group import Group
from benchmarks.loop.loops import ACCUMULATION, loss_of
from benchmarks.loop.peers import accelerated, fabricated
from benchmarks.report import arguments, in_turn, save, surroundings
from tests.support.rank_server import rank_server
from tests.support.ranked import open_group, ranked_loop
from tests.support.training import Rows, make_workload

MICRO_BATCH, WORLD = 32, 2
ROUNDS, STEPS = 30, 3
BATCHES = 16
"""Batches of an epoch."""
SAMPLES = ACCUMULATION * MICRO_BATCH * WORLD


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


def by_hand(model: nn.Module, data: Iterator[Any]) -> Callable[[], None]:
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
        "by hand": by_hand(workload.model(), data()),
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


def main() -> None:
    """Measure each model, print and save the figures."""
    arguments(__doc__)
    results = surroundings("accelerate", "lightning")
    with rank_server() as server:
        for name in MODELS:
            rounds = server.values(measure, name, world=WORLD, seconds=200)[0]
            hand = rounds.pop("by hand")
            results[name] = {"by hand, ms of CPU a step": cpu_milliseconds(hand)}
            results[name] |= {other: ratios(own, hand) for other, own in rounds.items()}
    print(json.dumps(results, indent=1))
    save("ranks-loop", results)


if __name__ == "__main__":
    main()
