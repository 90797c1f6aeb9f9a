"""Deep models traced by a few layers: the events of all layers, to the last byte and label."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autobatch.distributed.sharding.build import fake_ranks
from autobatch.distributed.sharding.model import Sharding
from autobatch.footprint.depth import cut_to, deep_footprint, like_layers
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


def test_a_few_layers_give_the_trace_of_all():
    asked = deep_setting()
    found = deep_footprint(asked)
    assert found.layers == 3, "the whole model was traced"
    assert are_equal(found.step, footprint(asked))


@pytest.mark.parametrize(
    "knobs",
    [
        {"optimizer": "fused"},
        pytest.param({"checkpointing": "full"}, marks=pytest.mark.slow),
        pytest.param({}, marks=pytest.mark.slow),
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


@pytest.mark.slow
def test_a_shallow_model_is_traced_as_it_is():
    found = deep_footprint(deep_setting(layers=3))
    assert found.layers is None


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


def test_like_layers_are_those_with_the_same_parameters():
    model = Transformer(depth=4)
    assert like_layers(model) == ("blocks", 4)
    model.blocks.append(nn.Linear(2, 2))
    assert like_layers(model) is None
    assert like_layers(nn.Linear(2, 2)) is None


@pytest.mark.parametrize("rates", [(0.0, 0.1), (0.1, 0.2)])
def test_layers_are_alike_if_they_do_the_same(rates):
    model = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Dropout(rate)) for rate in rates)
    assert (like_layers(model) is not None) == (0.0 not in rates)


def test_a_cut_model_shares_its_tensors():
    model = Transformer(depth=4)
    cut = cut_to(model, like_layers(model), 2)
    assert (len(cut.blocks), len(model.blocks)) == (2, 4)
    assert cut.head.weight is cut.embedding.weight is model.embedding.weight
