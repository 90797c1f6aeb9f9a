"""Fakes of models and batches: shapes, ties and containers stay."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autobatch.footprint.tracing.fakes import fake_batch, fake_model, new_mode
from tests.support.step_workloads import Transformer


class Sample:
    """A sample with attributes."""

    def __init__(self) -> None:
        self.x = torch.zeros(3, 2).t()
        self.name = "a"


class Graph:
    """A graph as torch-geometric's, whose ``__setattr__`` puts all into a mapping."""

    def __init__(self, store: dict[str, torch.Tensor]) -> None:
        vars(self)["store"] = store

    def __setattr__(self, name: str, value: object) -> None:
        self.store[name] = value


def test_fakes_keep_ties_shapes_and_containers() -> None:
    mode = new_mode()
    model = Transformer()
    fake = fake_model(model, mode)
    assert fake.head.weight is fake.embedding.weight
    assert [p.shape for p in fake.parameters()] == [p.shape for p in model.parameters()]
    assert all(type(p.data) is FakeTensor for p in fake.parameters())
    nested = [torch.zeros(2), (torch.ones(1, dtype=torch.int8), "text")]
    batch = {"x": nested, "object": Sample(), "graph": Graph({"nodes": torch.zeros(5)}), "n": 3}
    made = fake_batch(batch, mode)
    assert made["x"][0].shape == (2,)
    assert (made["x"][1][0].dtype, made["x"][1][1], made["n"]) == (torch.int8, "text", 3)
    assert made["object"].x.stride() == (1, 2)
    assert list(made["graph"].store) == ["nodes"]
    assert type(made["graph"].store["nodes"]) is FakeTensor
    assert type(batch["object"].x) is type(batch["graph"].store["nodes"]) is torch.Tensor
