"""Predictions against what fits when it really runs, and reasons where there is none."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autobatch.core.errors import InputError
from autobatch.core.units import GiB, MiB
from autobatch.device.allocator.caching import CachingAllocator
from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.device.allocator.trace import replay
from autobatch.footprint import predict as predicting
from autobatch.footprint import selftest
from autobatch.footprint.explain import explain
from autobatch.footprint.predict import Unpredictable, footprint, predict
from autobatch.footprint.program import largest
from autobatch.footprint.trace_step import record
from autobatch.probing.attempt import ATTEMPT_STEPS, attempt
from tests.footprint.test_trace_step import setting, setup
from tests.support.step_workloads import WORKLOADS, make, pair_loss, perceptron


def test_this_torch_passes_its_test():
    assert selftest.self_test() is None


@pytest.mark.parametrize("name", ["perceptron", "convolutions", "transformer"])
def test_the_largest_on_the_cpu_is_the_largest_that_runs(name):
    step = footprint(setting(setup(WORKLOADS[name]()), steps=ATTEMPT_STEPS))
    budget = replay(step.program.at(23), setup(WORKLOADS[name]()).device.new_allocator()).peak_allocated_bytes
    device = setup(WORKLOADS[name](), budget=budget + 100)
    size = largest(step.program, device.device.new_allocator, 1000)
    assert size >= 23
    assert attempt(device, size).attempt.fits
    assert not attempt(device, size + 1).attempt.fits


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_small_traces_tell_large_ones(precision):
    one = setting(setup(WORKLOADS["transformer"](), precision=precision), capability=(8, 0))
    assert footprint(one).program.agrees_with(64, record(one, 64).trace)


def test_a_loss_over_pairs_is_quadratic():
    one = setting(setup(make(perceptron, loss=pair_loss)), capability=(8, 0))
    assert footprint(one).program.agrees_with(50, record(one, 50).trace)


def test_a_prediction_is_an_interval_with_its_answer_inside():
    step = footprint(setting(setup(WORKLOADS["transformer"](), precision="bf16"), capability=(8, 9)))
    workspaces = (8_519_680, 2)
    found = predict(step, budget_bytes=256 * MiB, cap=10**6, workspaces=workspaces)
    assert found.fits
    assert 0 < found.micro_batch_low <= found.micro_batch <= found.micro_batch_high
    assert found.peak_allocated_bytes <= found.peak_reserved_bytes <= 256 * MiB
    without = predict(step, budget_bytes=256 * MiB, cap=10**6)
    assert without.micro_batch > found.micro_batch
    capped = predict(step, budget_bytes=256 * MiB, cap=7, workspaces=workspaces)
    assert capped[:3] == (7, 7, 7)
    asked = predict(step, budget_bytes=256 * MiB, cap=10**6, micro_batch=10**5, workspaces=workspaces)
    assert not asked.fits
    assert asked.peak_reserved_bytes > 256 * MiB
    none = predict(step, budget_bytes=MiB, cap=10**6)
    assert (none.micro_batch, none.fits) == (0, False)
    assert none.peak_allocated_bytes > 0


def test_a_prediction_is_what_three_searches_of_their_own_say():
    step = footprint(setting(setup(WORKLOADS["transformer"](), precision="bf16"), capability=(8, 9)))
    for budget in (MiB, 8 * MiB, 48 * MiB, 256 * MiB):
        found = predict(step, budget_bytes=budget, cap=5000)
        best, cautious, ideal = (
            largest(step.program, partial(kind, limit), 5000) or 0
            for kind, limit in (
                (CachingAllocator, budget),
                (CachingAllocator, int(budget * 0.97)),
                (CountingAllocator, budget),
            )
        )
        assert found.micro_batch_high == ideal
        assert found.micro_batch == pytest.approx(best, abs=1)
        assert found.micro_batch_low == pytest.approx(min(cautious, best), rel=0.02, abs=1)


def test_workspaces_come_at_the_first_products_and_stay():
    step = footprint(setting(setup(WORKLOADS["perceptron"]()), capability=(8, 0)))
    plain, more = step.program.at(4), predicting.with_workspaces(step, (MiB, 2)).at(4)
    added = [index for index, (_, size) in enumerate(more.events) if size == MiB]
    assert [more.phase_at(index) for index in added] == ["forward", "backward"]
    assert len(more.events) == len(plain.events) + 2


def test_says_where_the_memory_goes():
    one = setup(WORKLOADS["perceptron"]())
    step = footprint(setting(one, capability=(8, 0)))
    parameters = sum(p.nbytes for p in one.model.parameters())
    small, large = explain(step, 1), explain(step, 4096)
    assert small.by_kind["parameters"] == parameters
    assert small.by_kind["optimizer state"] == 2 * parameters
    for found in (small, large):
        assert sum(found.by_kind.values()) == found.peak_bytes
        assert list(found.by_kind.values()) == sorted(found.by_kind.values(), reverse=True)
        assert sum(found.by_module.values()) == found.by_kind.get("activations", 0)
        assert found.phase in found.text()
    # An image of 432 numbers, one hidden layer of 48: all per sample, in bytes.
    assert large.per_sample_bytes >= 4 * 432
    assert explain(step, 4097).peak_bytes == large.peak_bytes + large.per_sample_bytes


def case(forward):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(432, 5)

        def forward(self, x):
            return forward(self.layer(x.flatten(1)))

    return setting(setup(make(Model)), capability=(8, 0))


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (lambda y: y * len(torch.unique(y)), "unique.*values of the data"),
        (lambda y: y + torch.from_numpy(y.detach().numpy()), "does not run without values"),
        (lambda y: torch.cat([y, y[: len(y) // 2]])[: len(y)], "no whole rule|no polynomial|parabola|bytes"),
    ],
)
def test_says_why_it_cannot_predict(forward, words):
    one = case(forward)
    with pytest.raises(Unpredictable, match=words) as caught:
        footprint(one)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("cannot predict: ")


@pytest.mark.parametrize(
    "select",
    [
        lambda y, keep: y[keep],
        lambda y, keep: torch.masked_select(y, keep[:, None]).view(-1, 5),
        lambda y, keep: y[keep.nonzero()[:, 0]],
    ],
)
def test_a_selection_is_taken_to_keep_everything(select):
    def loss(model, batch):
        y, keep = model(batch[0]), batch[1] >= 0
        return F.cross_entropy(select(y, keep), batch[1][keep])

    one = setup(make(perceptron, loss=loss))
    step = footprint(setting(one, steps=ATTEMPT_STEPS))
    assert "selection" in step.notes[0]
    ran = attempt(one, 7).attempt.peak_allocated_bytes
    assert ran <= replay(step.program.at(7), one.device.new_allocator()).peak_allocated_bytes <= 1.1 * ran


def test_branches_on_values_go_one_way():
    def forward(y):
        return y * 2 if y.sum().item() > 0 else y.new_zeros(0)

    assert footprint(case(forward)).program.events


def test_input_errors_stay_what_they_are():
    workload = make(perceptron, loss=lambda model, batch: model(batch[0]))
    with pytest.raises(InputError, match="0-d"):
        footprint(setting(setup(workload), capability=(8, 0)))


def test_a_torch_whose_parts_have_moved_is_noticed(monkeypatch):
    one = setting(setup(WORKLOADS["perceptron"]()), capability=(8, 0))
    monkeypatch.setattr(predicting, "missing_parts", lambda: ["torch._C._gone"])
    with pytest.raises(Unpredictable, match=r"no torch\._C\._gone"):
        footprint(one)
    monkeypatch.undo()
    # Dropout that keeps no mask of its own: the self-test counts it.
    from autobatch.footprint import cuda_policy as personality

    monkeypatch.setattr(personality, "_dropout", lambda x, p, train: x * 2)
    assert "allocates in its forward" in selftest.self_test()
    monkeypatch.setattr(personality, "cuda_policy", None)
    monkeypatch.setattr("autobatch.footprint.trace_step.cuda_policy", None)
    assert "does not run" in selftest.self_test()


def test_a_large_model_in_seconds_and_without_memory():
    """0.4 B parameters, which would be 1.6 GB and thrice that for Adam; they never exist."""

    def model():
        return nn.Sequential(nn.Flatten(), nn.Linear(432, 20_000), nn.ReLU(), nn.Linear(20_000, 20_000))

    workload = make(model, loss=lambda m, batch: m(batch[0]).mean())
    one = setup(make(perceptron))
    with torch.device("meta"):
        built = workload.model()
    step = footprint(replace(setting(one, capability=(9, 0)), workload=workload, model=built))
    parameters = sum(p.numel() for p in built.parameters()) * 4
    found = predict(step, budget_bytes=24 * GiB, cap=10**6)
    assert found.peak_allocated_bytes > 4 * parameters
    assert 0 < found.micro_batch < 24 * GiB // (20_000 * 4)
    assert step.seconds < 20
