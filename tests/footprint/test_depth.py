"""Deep models traced by a few layers: the events of all layers, to the last byte and label."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autobatch.distributed.sharding.build import fake_ranks
from autobatch.distributed.sharding.model import Sharding
from autobatch.footprint.depth import Event, cut_to, deep_footprint, deepen, like_layers
from autobatch.footprint.fit import footprint
from autobatch.footprint.tracing.apart import run_apart
from tests.support.step_workloads import Tokens, Transformer, make, setting, setup, token_loss

LAYERS = 8


def deep_setting(layers: int = LAYERS, model=Transformer, **changes):
    workload = make(lambda: model(depth=layers), data=Tokens(), loss=token_loss)
    return replace(setting(setup(workload), capability=(8, 0), steps=(1,)), **changes)


def are_equal(one: Any, other: Any) -> bool:
    return (
        one.program.at(4).canonical() == other.program.at(4).canonical()
        and one.labels == other.labels
        and one.products == other.products
    )


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        pytest.param({"optimizer": "fused"}, marks=pytest.mark.slow),
        pytest.param({"checkpointing": "full"}, marks=pytest.mark.slow),
    ],
)
def test_a_few_layers_give_the_trace_of_all_in_each_remedy(knobs):
    asked = deep_setting(knobs=knobs, steps=(1, 2, 2))
    found = deep_footprint(asked)
    assert found.layers == 3, "the whole model was traced"
    assert are_equal(found.step, footprint(asked))


def compare_shards(sync: str) -> list[bool]:
    """Compare a few layers with all, on 4 ranks and then on 3, whose sizes follow from a single trace."""
    found = None
    equal = []
    for world in (4, 3):
        with fake_ranks(world) as mesh:
            asked = deep_setting(arrange=Sharding(mesh=mesh, sync=sync))  # type: ignore[arg-type]
            found = deep_footprint(asked) if found is None else found.on(asked)
            equal.append(are_equal(found.step, footprint(asked)))
    return equal


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["each", "once"])
def test_a_few_layers_give_the_trace_of_a_rank_of_many(sync):
    assert run_apart(lambda: compare_shards(sync)) == [True, True]


class Counting(Transformer):
    """A model that runs at its own depth only."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth=depth)
        self.depth = depth

    def forward(self, ids):
        x = self.embedding(ids)
        for number in range(self.depth):
            x = self.blocks[number](x)
        return self.head(x)


class Alternating(Transformer):
    """A model whose every other layer keeps more."""

    def forward(self, ids):
        x = self.embedding(ids)
        for number, block in enumerate(self.blocks):
            x = block(x) if number % 2 else torch.sin(block(x)).exp()
        return self.head(x)


@pytest.mark.slow
@pytest.mark.parametrize("model", [Counting, Alternating])
def test_a_model_that_does_not_repeat_is_traced_as_it_is(model):
    asked = deep_setting(model=model)
    found = deep_footprint(asked)
    assert found.layers is None
    assert are_equal(found.step, footprint(asked))


def test_lists_of_the_same_length_are_cut_together():
    def layers(count: int, size: int = 2) -> nn.ModuleList:
        return nn.ModuleList(
            nn.Sequential(nn.Linear(size, size), nn.Linear(size, size)) for _ in range(count)
        )

    model = nn.ModuleDict({"encoder": layers(4), "decoder": layers(4, size=3), "other": layers(3)})
    found = like_layers(model)
    assert found is not None
    assert (set(found.names), found.layers) == ({"encoder", "decoder"}, 4)
    cut = cut_to(model, 2)
    assert [len(one) for one in cut.values()] == [2, 2, 3]
    assert cut["encoder"][1][0].weight is model["encoder"][1][0].weight
    model["encoder"].append(nn.Linear(2, 2))
    assert like_layers(model) == (("decoder",), 4)


def layered(depth: int) -> list[Event]:
    """Return the events of a step: each layer takes a block, and the backward pass frees them in reverse."""
    takes = [Event(("take", "activations", "layer.#"), 8, (block, block)) for block in range(depth)]
    frees = [Event(("free", "activations", "layer.#", 1), 8, (n, n)) for n in reversed(range(depth))]
    head = Event(("take", "activations", "head"), 100, (depth,))
    return [*takes, Event(("mark", "backward")), head, *frees]


def normed(depth: int) -> list[Event]:
    """Return the events of a step that also takes a block as large as that of a layer at a depth of 4."""
    norms = Event(("take", "temporaries", ""), 2 * depth, (depth + 1,))
    blocks = layered(depth)
    return [*blocks[: depth + 2], norms, *blocks[depth + 2 :]]


def cleared(depth: int) -> list[Event]:
    """Return the events of a step whose gradients are freed in a row after each layer has taken a state.

    The head ends as a layer does, so the sizes of the frees leave open where the layers begin.
    """
    sizes = [1, 1, 2, 9, 1, *[1, 1, 3, 2, 1] * depth, 1, 1, 7]
    takes = [Event(("take", "gradients", ""), size, (block,)) for block, size in enumerate(sizes)]
    states = [Event(("take", "state", ""), 5, (len(sizes) + layer,)) for layer in range(depth)]
    frees = [Event(("free", "gradients", "", 1), one.size, one.numbers) for one in takes]
    temporary = frees.pop(3)
    return [*takes[:4], temporary, *takes[4:], Event(("mark", "optimizer")), *states, *frees]


@pytest.mark.parametrize("added", [0, 1, 7])
@pytest.mark.parametrize("step", [layered, normed, cleared])
def test_further_layers_have_the_events_of_a_deeper_step(step, added):
    deeper = deepen(step(3), step(4), step(5), added)
    expected = step(4 + added)
    assert [(one.key[:-1], one.numbers) for one in deeper] == [(one.key, one.numbers) for one in expected]
    assert [one.size + one.growth for one in deeper] == [one.size for one in expected]
