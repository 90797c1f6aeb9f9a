"""The trace of a step on fake tensors, against the trace of a real attempt."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.device.allocator.trace import FREE, replay
from autobatch.footprint.tracing.fakes import fake_batch, fake_model, new_mode
from autobatch.footprint.tracing.trace_mode import Recorder
from autobatch.footprint.tracing.trace_step import record
from autobatch.setup.attempt import ATTEMPT_STEPS, attempt
from tests.support.step_workloads import WORKLOADS, Transformer, make, perceptron, setting, setup, sgd


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_records_every_event_of_a_real_attempt(name, precision):
    if (name, precision) == ("convolutions", "bf16"):
        pytest.skip("torch's meta kernel of batch norm keeps its statistics in bf16, the real one in fp32")
    real = setup(WORKLOADS[name](), precision=precision)
    for size in (3, 11) if name == "perceptron" else (5,):
        ran = attempt(real, size)
        assert record(setting(real, steps=ATTEMPT_STEPS), size).trace == ran.trace.canonical()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["convolutions", "transformer", "recomputed"])
def test_a_steady_step_is_not_run_twice(name, precision, monkeypatch):
    one = setting(setup(WORKLOADS[name](), precision=precision), capability=(8, 0), steps=ATTEMPT_STEPS)
    forwards = []
    one.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    short = record(one, 3)
    assert len(forwards) == 3
    monkeypatch.setattr(Recorder, "repeat", lambda *_: False)
    assert record(one, 3) == short
    assert len(forwards) == 3 + 5


class Collector(nn.Module):
    """A model that keeps its inputs, and so grows from step to step."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(432, 5)
        self.seen = []

    def forward(self, x):
        self.seen.append(x * 2)
        return self.layer(x.flatten(1))


def loss_of_elements(name):
    """Return a loss whose result has a storage as large as its input."""

    def loss(model, batch):
        y = model(batch[0]).sigmoid()
        return getattr(nn.functional, name)(y, torch.zeros_like(y).expand(y.shape))

    return loss


def loss_of_samples(model, batch):
    chosen = torch.distributions.Normal(model(batch[0]), torch.ones(5))
    return -chosen.log_prob(chosen.rsample().detach()).mean()


LOSSES = ("mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy")
UNUSUAL = {
    **{name: partial(make, perceptron, loss=loss_of_elements(name)) for name in LOSSES},
    "distribution": partial(make, perceptron, loss=loss_of_samples),
    "rate in a tensor": partial(
        make, perceptron, optimizer=lambda params, rate: torch.optim.Adam(params, lr=torch.tensor(rate))
    ),
    "model that keeps its inputs": partial(make, Collector),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_records_every_event_of_unusual_steps(name):
    ran = attempt(setup(UNUSUAL[name]()), 7)
    one = setup(UNUSUAL[name]())
    assert record(setting(one, steps=ATTEMPT_STEPS), 7).trace == ran.trace.canonical()
    assert record(setting(one, capability=(8, 0)), 7).trace.events


@pytest.mark.parametrize("capability", [None, (8, 0)])
def test_a_trace_asks_no_gpu(capability, monkeypatch):
    """Torch's optimizers ask the current stream whether a graph captures it, which opens a context."""

    def asked(_):
        raise AssertionError("a step on fakes asked a GPU")

    monkeypatch.setattr(torch.optim.Optimizer, "_accelerator_graph_capture_health_check", asked)
    one = setup(WORKLOADS["transformer"]())
    assert record(setting(one, capability=capability), 2).trace.events


def test_a_trace_leaves_model_and_random_states_unchanged():
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


def test_a_model_without_memory_records_the_same():
    one = setup(WORKLOADS["transformer"]())
    here = record(setting(one, capability=(8, 0)), 3)
    with torch.device("meta"):
        one = replace(one, model=one.workload.model())
    assert record(setting(one, capability=(8, 0)), 3) == here


def test_labels_add_up_by_hand():
    """A tied model has parameters, gradients and two moments, and two places for workspaces."""
    one = setup(WORKLOADS["transformer"]())
    parameters = sum(p.nbytes for p in one.model.parameters())
    for steps, gradients in (((1,), 1), ((1, 2), 2)):
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


def test_fake_copies_keep_ties_shapes_and_containers():
    mode = new_mode()
    model = Transformer()
    fake = fake_model(model, mode)
    assert fake.head.weight is fake.embedding.weight
    assert [p.shape for p in fake.parameters()] == [p.shape for p in model.parameters()]
    assert all(
        type(p) is not type(q) or p is not q
        for p, q in zip(fake.parameters(), model.parameters(), strict=True)
    )

    class Sample:
        def __init__(self):
            self.x = torch.zeros(3, 2).t()
            self.name = "a"

    batch = {"x": [torch.zeros(2), (torch.ones(1, dtype=torch.int8), "text")], "object": Sample(), "n": 3}
    made = fake_batch(batch, mode)
    assert made["x"][0].shape == (2,)
    assert (made["x"][1][0].dtype, made["x"][1][1], made["n"]) == (torch.int8, "text", 3)
    assert made["object"].x.stride() == (1, 2)
    assert batch["object"].x.untyped_storage().nbytes() == 24
    assert type(batch["object"].x) is torch.Tensor


def test_fake_copies_reach_tensors_of_an_object_that_sets_attributes_elsewhere():
    """A graph of torch-geometric has its tensors in a mapping, where its ``__setattr__`` puts all."""

    class Graph:
        def __init__(self, store):
            vars(self)["store"] = store

        def __setattr__(self, name, value):
            self.store[name] = value

    graph = Graph({"nodes": torch.zeros(5)})
    made = fake_batch(graph, new_mode())
    assert type(made.store["nodes"]) is FakeTensor
    assert list(made.store) == ["nodes"]
    assert type(graph.store["nodes"]) is torch.Tensor


def test_fake_copies_reach_weights_that_layers_keep_elsewhere():
    """A recurrent layer keeps a list of its parameters, and a tensor attribute is no buffer."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(12, 6, batch_first=True)
            self.scale = torch.full((6,), 2.0)
            self.out = nn.Linear(6, 5)

        def forward(self, x):
            return self.out((self.gru(x.flatten(1, 2)[:, :4])[0] * self.scale).mean(1))

    one = setup(make(Recurrent, optimizer=sgd))
    ran = attempt(one, 3)
    found = replay(
        record(setting(one, steps=ATTEMPT_STEPS), 3).trace, CountingAllocator()
    ).peak_allocated_bytes
    assert found == pytest.approx(ran.attempt.peak_allocated_bytes, rel=0.01)


def test_activations_are_named_after_the_module_that_made_them():
    """The loss calls the two towers directly, and each keeps its own name."""

    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.left = nn.Sequential(nn.Flatten(), nn.Linear(432, 8))
            self.right = nn.Sequential(nn.Flatten(), nn.Linear(432, 8))

    def loss(model, batch):
        return (model.left(batch[0]) * model.right(batch[0])).mean()

    found = record(setting(setup(make(Towers, loss=loss)), steps=(1,)), 4)
    modules = [label.module for label in found.labels if label.kind == "activations"]
    assert modules.index("left.1") < modules.index("right.1")
    assert set(modules) <= {"", "left.1", "right.1"}
    assert found.trace.phase_at(found.products[0].at) == "forward"
