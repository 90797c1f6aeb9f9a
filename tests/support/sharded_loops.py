"""Loops over sharded parameters, as every rank of a test builds its own, and the tensors that they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from autobatch import Workload
from autobatch.distributed.engine import Shared
from autobatch.distributed.group import Group
from autobatch.distributed.shard import shard
from autobatch.step.train_step import train_step
from autobatch.training.loop import Loop
from autobatch.training.resume import capture_loop
from autobatch.workload.data import load_micro_batch
from autobatch.workload.nested import map_leaves
from autobatch.workload.order import Split
from tests.support.training import digest, make_loop, make_workload, points

SAMPLES = 12


class Blocks(nn.Module):
    """A model with blocks, a tied weight, a buffer, and a weight with fewer rows than some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.full((5,), 0.5))
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2)])
        self.mix = nn.Linear(5, 5, bias=False)
        self.mix_again = nn.Linear(5, 5, bias=False)
        self.mix_again.weight = self.mix.weight
        self.head = nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.mix(inputs + self.offset)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.mix_again(hidden))


def block_workload() -> Workload:
    """Return a workload with an optimizer that has state, in float64."""

    def model() -> nn.Module:
        torch.manual_seed(1)
        return Blocks().double()

    return make_workload(
        model=model,
        train_data=points(SAMPLES),
        optimizer=lambda params, lr: torch.optim.AdamW(params, lr=lr, amsgrad=True),
        learning_rate=0.01,
    )


def sharded_loop(
    group: Group,
    workload: Workload,
    limits: Sequence[int] | None = None,
    **options: Any,
) -> Loop:
    """Build the loop of a rank that has a part of every parameter; all have the least limit."""
    mesh = init_device_mesh("cpu", (group.world,))
    arranged: list[Any] = []
    precision = options.get("precision", "fp32")

    def model() -> nn.Module:
        whole = workload.model()
        arranged.append(shard(mesh, whole, precision))
        return whole

    loop = make_loop(
        replace(workload, model=model),
        micro_batch=min(limits or [SAMPLES]),
        split=Split(group.rank, group.world),
        **options,
    )
    arranged[0].attach(loop.train_state)
    loop.engine = Shared(group, loop.train_state, lambda: load_micro_batch(workload, [0, 1]))
    return loop


def step_together(loop: Loop, steps: int) -> None:
    """Take so many steps, each over all samples; every rank has its share of them."""
    rank, world = loop.engine.ranks.rank, loop.engine.ranks.world
    size = SAMPLES // world
    rows = [loop.workload.train_data[index] for index in range(rank * size, (rank + 1) * size)]
    for _ in range(steps):
        train_step(loop.train_state, [(torch.utils.data.default_collate(rows), size)], SAMPLES)
        loop.batches_seen += 1
        loop.steps_applied += 1


def contents(loop: Loop) -> dict[str, str]:
    """Return the digest of each tensor that a loop keeps in a checkpoint, by its place; all ranks call it."""
    found: dict[str, str] = {}

    def note(place: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and not place.startswith(("random", "ranks")):
            found[place] = digest(leaf.full_tensor() if isinstance(leaf, DTensor) else leaf)
        return leaf

    map_leaves(capture_loop(loop), note)
    return found
