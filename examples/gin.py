"""A graph isomorphism network (Xu et al. 2019) that tells rings from trees; graphs are joined, as in PyG.

python examples/gin.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import autobatch  # +

Graph = dict[str, Tensor]


class Gin(nn.Module):
    """Sums over neighbours, and a sum over the nodes of a graph after each of three layers."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(3))
        sizes = [(1, width), (width, width), (width, width)]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(a, b), nn.LayerNorm(b), nn.ReLU(), nn.Linear(b, b), nn.ReLU())
            for a, b in sizes
        )
        self.heads = nn.ModuleList(nn.Linear(width, 2) for _ in sizes)

    def forward(self, batch: Graph) -> Tensor:
        """Return the scores of each graph."""
        (start, end), nodes = batch["edges"], batch["nodes"]
        scores = nodes.new_zeros(len(batch["labels"]), 2)
        for weight, layer, head in zip(self.weights, self.layers, self.heads, strict=True):
            near = torch.zeros_like(nodes).index_add(0, end, nodes[start])
            nodes = layer((1 + weight) * nodes + near)
            scores = scores.index_add(0, batch["graph"], head(nodes) / 10)
        return scores


def graphs(count: int = 512) -> list[Graph]:
    """Draw rings and trees of 6 to 24 nodes, with an edge or two at random."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for number in range(count):
        size = int(torch.randint(6, 25, (), generator=draw))
        start = torch.arange(1, size)
        parents = (torch.rand(size - 1, generator=draw) * start).long()
        end = start - 1 if number % 2 else parents
        start, end = torch.cat([start, torch.tensor([0])]), torch.cat([end, torch.tensor([size - 1])])
        edges = torch.stack([torch.cat([start, end]), torch.cat([end, start])])
        found.append({"nodes": torch.ones(size, 1), "edges": edges, "labels": torch.tensor(number % 2)})
    return found


def join(samples: list[Graph]) -> Graph:
    """Join graphs end to end: node numbers move on by the nodes before."""
    sizes = torch.tensor([len(one["nodes"]) for one in samples])
    first = (sizes.cumsum(0) - sizes).tolist()
    return {
        "nodes": torch.cat([one["nodes"] for one in samples]),
        "edges": torch.cat([one["edges"] + place for one, place in zip(samples, first, strict=True)], 1),
        "graph": torch.arange(len(samples)).repeat_interleave(sizes),
        "labels": torch.stack([one["labels"] for one in samples]),
    }


def loss(model: nn.Module, batch: Graph) -> Tensor:
    """Return the mean over the graphs."""
    return cross_entropy(model(batch), batch["labels"])


def workload() -> autobatch.Workload:  # +
    """Return the model, the data and the loss."""
    parts = {"model": Gin, "train_data": graphs(), "collate": join, "loss": loss}  # +
    return autobatch.Workload(**parts, optimizer=torch.optim.Adam, learning_rate=1e-2)  # +


if __name__ == "__main__":
    print(autobatch.fit(workload, target_batch=128, memory_budget="4MiB", steps=20, trials=0))  # +
