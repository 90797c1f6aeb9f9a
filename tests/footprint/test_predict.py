"""Predictions against real runs, and the reasons for having none."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from autobatch import InputError
from autobatch.core.units import GiB, MiB
from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.device.allocator.trace import replay
from autobatch.device.profiles import USUAL_PROCESSORS, Libraries
from autobatch.footprint import predict as predicting
from autobatch.footprint.fit import Unpredictable, footprint
from autobatch.footprint.largest import Fitting
from autobatch.footprint.predict import gpu_allocator, predict, program_on
from autobatch.footprint.tracing.trace_step import record
from autobatch.setup.attempt import ATTEMPT_STEPS, attempt
from tests.support.step_workloads import WORKLOADS, make, pair_loss, perceptron, setting, setup


@pytest.mark.parametrize("name", ["perceptron", "convolutions", "transformer"])
def test_the_largest_on_the_cpu_is_the_largest_that_runs(name):
    step = footprint(setting(setup(WORKLOADS[name]()), steps=ATTEMPT_STEPS))
    budget = replay(step.program.at(23), setup(WORKLOADS[name]()).device.new_allocator()).peak_allocated_bytes
    device = setup(WORKLOADS[name](), budget=budget + 100)
    size = Fitting([step.program], device.device.new_allocator).largest(1000)
    assert size >= 23
    assert attempt(device, size).attempt.fits
    assert not attempt(device, size + 1).attempt.fits


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_small_traces_give_large_ones(precision):
    one = setting(setup(WORKLOADS["transformer"](), precision=precision), capability=(8, 0))
    assert footprint(one).program.agrees_with(64, record(one, 64).trace)


def test_a_loss_over_pairs_is_quadratic():
    one = setting(setup(make(perceptron, loss=pair_loss)), capability=(8, 0))
    assert footprint(one).program.agrees_with(50, record(one, 50).trace)


def test_a_prediction_is_an_interval_around_its_answer(monkeypatch):
    monkeypatch.setattr(predicting, "workspace_rule", lambda *_: "shared")  # as until torch 2.14
    step = footprint(setting(setup(WORKLOADS["transformer"](), precision="bf16"), capability=(8, 9)))
    libraries = Libraries((8_519_680, 2), USUAL_PROCESSORS)
    found = predict(step, budget_bytes=256 * MiB, cap=10**6, libraries=libraries)
    assert found.fits
    assert 0 < found.micro_batch_low <= found.micro_batch <= found.micro_batch_high
    assert found.peak_allocated_bytes <= found.peak_reserved_bytes <= 256 * MiB
    without = predict(step, budget_bytes=256 * MiB, cap=10**6)
    assert without.micro_batch > found.micro_batch
    capped = predict(step, budget_bytes=256 * MiB, cap=7, libraries=libraries)
    assert capped[:3] == (7, 7, 7)
    asked = predict(step, budget_bytes=256 * MiB, cap=10**6, micro_batch=10**5, libraries=libraries)
    assert not asked.fits
    assert asked.peak_reserved_bytes > 256 * MiB
    none = predict(step, budget_bytes=MiB, cap=10**6)
    assert (none.micro_batch, none.fits) == (0, False)
    assert none.peak_allocated_bytes > 0


def test_a_prediction_is_the_edge_of_what_a_replay_allows():
    """What fits is not monotone, so the edge need not be the only one."""
    step = footprint(setting(setup(WORKLOADS["transformer"](), precision="bf16"), capability=(8, 9)))

    def fits(m, allocator):
        return replay(step.program.at(m), allocator).fits

    for budget in (MiB, 8 * MiB, 48 * MiB, 256 * MiB):
        found = predict(step, budget_bytes=budget, cap=5000)
        cautious = int(budget * (1 - step.margin))
        for m, allocator in (
            (found.micro_batch_high, partial(CountingAllocator, budget)),
            (found.micro_batch, partial(gpu_allocator, budget)),
            (found.micro_batch_low, partial(gpu_allocator, cautious)),
        ):
            assert m == 0 or fits(m, allocator())
            assert m in (5000, found.micro_batch) or not fits(m + 1, allocator())
        assert found.micro_batch_low <= found.micro_batch <= found.micro_batch_high
        assert found.micro_batch in (0, found.micro_batch_high) or not fits(
            found.micro_batch + 1, gpu_allocator(budget)
        )


@pytest.mark.parametrize("rule", ["apart", "shared", "freed"])
def test_workspaces_are_taken_by_the_rule_of_each_torch(rule):
    """A perceptron adds its biases forward in products of cuBLASLt; cuBLAS runs those backward."""
    size = 4 * MiB
    step = footprint(setting(setup(WORKLOADS["perceptron"]()), capability=(8, 0)))
    plain = step.program.at(4)
    found = program_on(step, Libraries((size, 2), USUAL_PROCESSORS), rule=rule).at(4)
    added = [
        (found.phase_at(at), taken) for at, (_, taken) in enumerate(found.events) if taken in (MiB, size)
    ]
    assert [phase for _, phase in found.marks] == [phase for _, phase in plain.marks]
    if rule == "freed":
        assert len(added) == len(step.products) > 3
        assert set(added) == {("forward", MiB), ("backward", size)}
        kept = 0
    else:
        kept = 2 * size + (rule == "apart") * MiB
        own = [("forward", MiB)] * (rule == "apart")
        assert added == [("forward", size), *own, ("backward", size)]
    assert len(found.events) == len(plain.events) + len(added) * (2 if rule == "freed" else 1)
    held = [replay(trace, CountingAllocator()).allocated_bytes for trace in (plain, found)]
    assert held[1] - held[0] == kept


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
        (lambda y: torch.cat([y, y[: len(y) // 2]])[: len(y)], "no integer rule|no polynomial|bytes"),
    ],
)
def test_an_unpredictable_step_has_a_reason_in_one_line(forward, words):
    one = case(forward)
    with pytest.raises(Unpredictable, match=words) as caught:
        footprint(one)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("cannot predict: ")


def test_a_branch_on_values_takes_one_way():
    def forward(y):
        return y * 2 if y.sum().item() > 0 else y.new_zeros(0)

    assert footprint(case(forward)).program.events


def test_input_errors_are_not_translated():
    workload = make(perceptron, loss=lambda model, batch: model(batch[0]))
    with pytest.raises(InputError, match="0-d"):
        footprint(setting(setup(workload), capability=(8, 0)))


def test_a_torch_without_a_needed_part_gives_no_prediction(monkeypatch):
    one = setting(setup(WORKLOADS["perceptron"]()), capability=(8, 0))
    monkeypatch.setattr("autobatch.footprint.fit.missing_parts", lambda: ["torch._C._gone"])
    with pytest.raises(Unpredictable, match=r"no torch\._C\._gone"):
        footprint(one)


def test_a_large_model_in_seconds_and_without_memory():
    """0.4 B parameters would take 1.6 GB, and Adam three times as much. None of that exists."""

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
