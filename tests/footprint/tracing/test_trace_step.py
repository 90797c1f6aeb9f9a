"""The trace of a step on fake tensors, against the events of a real attempt."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import autobatch
from autobatch import Workload
from autobatch.core.options import Options
from autobatch.device.allocator.trace import FREE, replay
from autobatch.footprint.fit import footprint
from autobatch.footprint.tracing.trace_mode import Recorder
from autobatch.footprint.tracing.trace_step import record
from autobatch.rehearsal.attempt import ATTEMPT_STEPS, attempt
from autobatch.rehearsal.setup import open_setup
from tests.support.probes import mlp, work
from tests.support.step_workloads import WORKLOADS, image_loss, make, perceptron, setting, setup, sgd


class Collector(nn.Module):
    """A model that keeps its inputs, and so grows from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(432, 5)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x * 2)
        return self.layer(x.flatten(1))


class Recurrent(nn.Module):
    """A recurrent layer, which keeps a list of its weights, and a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(12, 16, batch_first=True), nn.Linear(16, 5)
        self.scale = torch.full((16,), 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.flatten(1, 2)[:, :4])[0][:, -1] * self.scale)


def loss_of_elements(name: str) -> Callable[..., Tensor]:
    """Return a loss whose result has a storage as large as its input."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        y = model(batch[0]).sigmoid()
        return getattr(F, name)(y, torch.zeros_like(y).expand(y.shape))

    return loss


def loss_of_samples(model: nn.Module, batch: Any) -> Tensor:
    chosen = torch.distributions.Normal(model(batch[0]), torch.ones(5))
    return -chosen.log_prob(chosen.rsample().detach()).mean()


class Experts(nn.Module):
    """Three experts, each for a third of the rows, in one product."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 16), nn.Linear(24, 4)
        self.experts = nn.Parameter(torch.randn(3, 16, 24))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.inner(x.repeat_interleave(3, 0))
        ends = torch.arange(len(x), 3 * len(x) + 1, len(x), dtype=torch.int32)
        return self.head(F.grouped_mm(rows, self.experts.to(rows.dtype), offs=ends)).square().mean()


def loss_of_pairs(model: nn.Module, batch: Any) -> Tensor:
    """Pair rows of the model with rows of the batch at the least cost, on the host."""
    y = model(batch[0])
    cost = torch.cdist(y.detach(), torch.zeros_like(y))
    rows, columns = linear_sum_assignment(cost)
    assert {*map(len, cost.tolist())} == {len(y)}
    order = torch.as_tensor(columns[np.argsort(cost[rows, columns].cpu().numpy())])
    return y[order].square().mean()


class Case(NamedTuple):
    workload: Callable[[], Workload]
    precision: str = "fp32"
    sizes: tuple[int, ...] = (5,)


CASES = {
    **{f"{name} {precision}": Case(made, precision)
        for name, made in WORKLOADS.items()
        for precision in ("fp32", "bf16")
        if (name, precision) != ("convolutions", "bf16")},
    **{name: Case(partial(make, perceptron, loss=loss_of_elements(name)))
        for name in ("mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy")},
    "several sizes": Case(WORKLOADS["perceptron"], sizes=(3, 11)),
    "distribution": Case(partial(make, perceptron, loss=loss_of_samples)),
    "rate in a tensor": Case(partial(make, perceptron, optimizer=lambda parameters, rate: torch.optim.Adam(
        parameters, lr=torch.tensor(rate)))),
    **{f"experts {precision}": Case(partial(work, Experts, train_data=list(torch.ones(20, 4)),
        loss=lambda model, batch: model(batch)), precision, sizes=(3, 7)) for precision in ("fp32", "bf16")},
    "pairs on the host": Case(partial(make, perceptron, loss=loss_of_pairs)),
    "model that keeps its inputs": Case(partial(make, Collector)),
    "recurrent": Case(partial(make, Recurrent, optimizer=sgd)),
    "batch norm in bf16": Case(partial(make, lambda: nn.Sequential(
        nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 5)
    )), "bf16"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_records_every_event_of_a_real_attempt(name: str) -> None:
    case = CASES[name]
    for size in case.sizes:
        ran = attempt(setup(case.workload(), precision=case.precision), size)
        one = setting(setup(case.workload(), precision=case.precision), steps=ATTEMPT_STEPS)
        found = record(one, size)
        assert found.trace == ran.trace.canonical()
        assert not found.has_selections
        assert found.has_reads == (name == "pairs on the host")
    assert record(replace(one, capability=(8, 0)), 7).trace.events


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


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    "optimizer", [by_sparse_adam, lambda parameters, rate: torch.optim.Adagrad(parameters, lr=rate)]
)
@pytest.mark.parametrize("embedding", [nn.Embedding, nn.EmbeddingBag, partial(nn.EmbeddingBag, mode="sum")])
def test_sparse_gradients_are_predicted_with_their_entries(embedding, optimizer) -> None:
    data = TensorDataset(torch.arange(128).reshape(16, 8), torch.arange(16) % 4)
    workload = make(
        lambda: Words(embedding(4000, 16, sparse=True)), data=data, loss=image_loss, optimizer=optimizer
    )
    one = setup(workload, max_grad_norm=None)
    real = attempt(one, 3).trace.canonical().events
    traced = record(setting(one, steps=ATTEMPT_STEPS), 3).trace.events
    assert [(block, size == FREE) for block, size in traced] == [
        (block, size == FREE) for block, size in real
    ]
    differ = [(a, b) for (_, a), (_, b) in zip(traced, real, strict=True) if a != b]
    # Both micro-batches of a step are the same samples, so rows occur twice, and the trace counts both.
    assert all(a == 2 * b for a, b in differ)
    assert len(differ) < 0.1 * len(real)


@pytest.mark.parametrize(
    "select",
    [
        lambda y, keep: y[keep],
        lambda y, keep: torch.masked_select(y, keep[:, None]).view(-1, 5),
        lambda y, keep: y[keep.nonzero()[:, 0]],
    ],
)
def test_a_selection_keeps_everything(select) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        y, keep = model(batch[0]), batch[1] >= 0
        return F.cross_entropy(select(y, keep), batch[1][keep])

    one = setup(make(perceptron, loss=loss))
    step = footprint(setting(one, steps=ATTEMPT_STEPS))
    assert "selection" in step.notes[0]
    ran = attempt(one, 7).attempt.peak_allocated_bytes
    assert ran <= replay(step.program.at(7), one.device.new_allocator()).peak_allocated_bytes <= 1.1 * ran


@pytest.mark.parametrize(("device", "budget"), [("cpu", "800KiB"), ("sim:t4", "6MiB")])
def test_a_loss_that_reads_values_on_the_host_takes_one_run(device: str, budget: str) -> None:
    workload = work(lambda: mlp(512), loss=loss_of_pairs)
    found = autobatch.probe(workload, device=device, memory_budget=budget).probe
    assert (len(found.attempts), found.limited_by) == (1, "memory")
    made = open_setup(workload, Options().with_values(device=device, memory_budget=budget))
    assert not attempt(made, found.micro_batch + 1).attempt.fits
    assert any("NumPy" in note for note in footprint(setting(made)).notes)


@pytest.mark.parametrize(("name", "precision"), [("recomputed", "bf16")])
def test_a_steady_step_is_not_run_twice(name, precision, monkeypatch) -> None:
    one = setting(setup(WORKLOADS[name](), precision=precision), capability=(8, 0), steps=ATTEMPT_STEPS)
    forwards: list[int] = []
    one.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    short = record(one, 3)
    assert len(forwards) == 3
    monkeypatch.setattr(Recorder, "repeat", lambda *_: False)
    assert record(one, 3) == short
    assert len(forwards) == 3 + 5


@pytest.mark.parametrize("capability", [None, (8, 0)])
def test_a_trace_asks_no_gpu(capability, monkeypatch) -> None:
    """Torch's optimizers ask the current stream whether a graph captures it, which opens a context."""

    def asked(_: Any) -> None:
        raise AssertionError("a step on fakes asked a GPU")

    monkeypatch.setattr(torch.optim.Optimizer, "_accelerator_graph_capture_health_check", asked)
    one = setup(WORKLOADS["transformer"]())
    assert record(setting(one, capability=capability), 2).trace.events


def test_a_trace_leaves_model_and_random_states_unchanged() -> None:
    one = setup(WORKLOADS["transformer"]())
    before = {name: tensor.clone() for name, tensor in one.model.state_dict().items()}
    objects = [id(p) for p in one.model.parameters()]
    one.model.eval()
    random.seed(5)
    torch.manual_seed(5)
    record(setting(one, capability=(8, 0)), 2)
    drawn = random.random(), torch.rand(())
    random.seed(5)
    torch.manual_seed(5)
    assert drawn == (random.random(), torch.rand(()))
    assert not one.model.training
    assert [id(p) for p in one.model.parameters()] == objects
    assert all(p.grad is None for p in one.model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in one.model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in one.model.modules())


def test_a_model_without_memory_records_the_same() -> None:
    one = setup(WORKLOADS["transformer"]())
    here = record(setting(one, capability=(8, 0)), 3)
    with torch.device("meta"):
        one = replace(one, model=one.workload.model())
    assert record(setting(one, capability=(8, 0)), 3) == here


@pytest.mark.parametrize(("steps", "gradients", "precision"), [((1,), 1, "fp16"), ((1, 2), 2, "fp32")])
def test_labels_add_up_by_hand(steps, gradients, precision) -> None:
    """A tied model has parameters, gradients and two moments; a step in fp16 has no overflow."""
    one = setup(WORKLOADS["transformer"](), precision=precision)
    parameters = sum(p.nbytes for p in one.model.parameters())
    found = record(setting(one, capability=(8, 0), steps=steps), 4)
    assert [block for block, size in found.trace.events if size != FREE] == list(range(len(found.labels)))
    made: dict[str, int] = {}
    for block, size in found.trace.events:
        if size != FREE:
            kind = found.labels[block].kind
            made[kind] = made.get(kind, 0) + size
    assert made["parameters"] == parameters
    assert made["optimizer state"] == 2 * parameters
    assert made["gradients"] == gradients * parameters
    assert made["batch"] == sum(steps) * 4 * 17 * 8
    for one in found.products:
        assert found.trace.events[one.at - 1][1] != FREE
        assert found.trace.phase_at(one.at) == ("backward" if one.is_backward else "forward")
    modules = {label.module for label in found.labels if label.kind == "activations"}
    assert {"embedding", "blocks.0.norm", "blocks.1.mlp.1", "head"} <= modules


class Towers(nn.Module):
    """Two towers that the loss calls directly."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Flatten(), nn.Linear(432, 8))
        self.right = nn.Sequential(nn.Flatten(), nn.Linear(432, 8))


def test_activations_are_named_after_the_module_that_made_them() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return (model.left(batch[0]) * model.right(batch[0])).mean()

    found = record(setting(setup(make(Towers, loss=loss)), steps=(1,)), 4)
    modules = [label.module for label in found.labels if label.kind == "activations"]
    assert modules.index("left.1") < modules.index("right.1")
    assert set(modules) <= {"", "left.1", "right.1"}
