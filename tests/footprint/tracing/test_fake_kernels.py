"""Traced steps with sparse gradients and recurrent layers, against the allocations of real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from autobatch import Workload
from autobatch.core.options import Options
from autobatch.device.allocator.trace import FREE, Trace
from autobatch.footprint.tracing.trace_step import record
from autobatch.setup.attempt import attempt
from autobatch.setup.setup import open_setup
from autobatch.setup.trace import setting_of

aten = torch.ops.aten
ROWS, LENGTH = 4000, 8


class Words(nn.Module):
    """The mean of sparse embeddings, and a classifier."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding, self.head = embedding, nn.Linear(16, 4)

    def forward(self, ids: Tensor) -> Tensor:
        found = self.embedding(ids)
        return self.head(found if found.dim() == 2 else found.mean(1))


def by_sparse_adam(model: nn.Module, learning_rate: float) -> Any:
    sparse = torch.optim.SparseAdam(list(model.embedding.parameters()), lr=learning_rate)
    return sparse, torch.optim.SGD(model.head.parameters(), lr=learning_rate)


def adagrad(params: Any, learning_rate: float) -> Any:
    return torch.optim.Adagrad(params, lr=learning_rate)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def traces(
    model: Callable[[], nn.Module], inputs: Tensor, optimizer: Any, precision: Any = "fp32"
) -> tuple[Trace, Trace]:
    """Return the traced and the recorded events of an attempt at a micro-batch of 3."""
    labels = torch.arange(len(inputs)) % 4
    workload = Workload(
        model=model,
        train_data=TensorDataset(inputs, labels),
        loss=loss,
        optimizer=optimizer,
        learning_rate=1e-3,
    )
    setup = open_setup(
        workload, Options().with_values(device="cpu", memory_budget="1GiB", precision=precision)
    )
    real = attempt(setup, 3).trace
    assert real is not None
    return record(setting_of(setup), 3).trace, real.canonical()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("optimizer", [adagrad, by_sparse_adam])
@pytest.mark.parametrize(
    "embedding",
    [
        lambda: nn.Embedding(ROWS, 16, sparse=True),
        lambda: nn.EmbeddingBag(ROWS, 16, sparse=True),
        lambda: nn.EmbeddingBag(ROWS, 16, sparse=True, mode="sum"),
    ],
    ids=["embedding", "mean", "sum"],
)
def test_sparse_gradients_are_predicted_with_their_entries(embedding, optimizer) -> None:
    ids = torch.arange(16 * LENGTH).reshape(16, LENGTH)
    traced, real = traces(lambda: Words(embedding()), ids, optimizer)
    shapes = [[(block, size == FREE) for block, size in each.events] for each in (traced, real)]
    assert shapes[0] == shapes[1]
    differ = [(a, b) for (_, a), (_, b) in zip(traced.events, real.events, strict=True) if a != b]
    # Both micro-batches of a step are the same samples, so rows occur twice, and the trace counts both.
    assert all(a == 2 * b for a, b in differ)
    assert len(differ) < 0.1 * len(real.events)


class Recurrent(nn.Module):
    """A recurrent classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.body(inputs)[0][:, -1])


def test_a_recurrent_layer_has_a_gradient_for_each_bias_in_its_first_trace_too() -> None:
    traced, real = traces(Recurrent, torch.randn(16, 5, 8), adagrad)
    assert traced == real


def test_the_statistics_of_a_batch_norm_have_the_type_of_its_weights() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 64, 3), nn.BatchNorm2d(64), nn.Flatten(), nn.LazyLinear(4))

    def built() -> nn.Module:
        made = model()
        made(torch.randn(2, 2, 5, 5))
        return made

    traced, real = traces(built, torch.randn(16, 2, 5, 5), adagrad, precision="bf16")
    assert traced.events == real.events
