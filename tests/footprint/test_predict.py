"""Predictions against real runs, and the reasons for having none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autobatch import InputError
from autobatch.core.units import KiB, MiB
from autobatch.device.allocator.caching import AllocatorConfig, CachingAllocator
from autobatch.device.allocator.ledger import BudgetExceeded, CountingAllocator
from autobatch.device.allocator.trace import replay
from autobatch.device.profiles import USUAL_PROCESSORS, Libraries
from autobatch.footprint import fitting as fittings
from autobatch.footprint import predict as predicting
from autobatch.footprint.fit import Unpredictable, footprint
from autobatch.footprint.predict import Fitting, predict, program_on
from autobatch.footprint.program import Program
from autobatch.footprint.tracing.trace_step import record
from autobatch.rehearsal.attempt import ATTEMPT_STEPS, attempt
from tests.support.recipes import recipes, trace, trace_of
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


@pytest.mark.parametrize(("loss", "precision"), [("tokens", "bf16"), ("tokens", "fp16"), ("pairs", "fp32")])
def test_small_traces_give_large_ones(loss, precision):
    """A loss over pairs of samples is quadratic."""
    workload = make(perceptron, loss=pair_loss) if loss == "pairs" else WORKLOADS["transformer"]()
    one = setting(setup(workload, precision=precision), capability=(8, 0))
    assert footprint(one).program.agrees_with(64, record(one, 64).trace)


def test_a_prediction_is_an_interval_around_its_answer(monkeypatch):
    monkeypatch.setattr(predicting, "workspace_rule", lambda *_: "shared")  # as until torch 2.14
    step = footprint(setting(setup(WORKLOADS["transformer"](), precision="bf16"), capability=(8, 9)))
    libraries = Libraries((8_519_680, 2), USUAL_PROCESSORS)
    found = predict(step, budget_bytes=256 * MiB, cap=10**6, libraries=libraries)
    assert found.fits
    assert 0 < found.micro_batch_low <= found.micro_batch <= found.micro_batch_high
    assert found.outcome.peak_allocated_bytes <= found.outcome.peak_reserved_bytes <= 256 * MiB
    without = predict(step, budget_bytes=256 * MiB, cap=10**6)
    assert without.micro_batch > found.micro_batch
    capped = predict(step, budget_bytes=256 * MiB, cap=7, libraries=libraries)
    assert capped[:3] == (7, 7, 7)
    asked = predict(step, budget_bytes=256 * MiB, cap=10**6, micro_batch=10**5, libraries=libraries)
    assert not asked.fits
    assert asked.outcome.peak_reserved_bytes > 256 * MiB
    none = predict(step, budget_bytes=MiB, cap=10**6)
    assert (none.micro_batch, none.fits) == (0, False)
    assert none.outcome.peak_allocated_bytes > 0


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
        (lambda y: y * sum(y.untyped_storage().tolist()), "does not run without values"),
        (lambda y: torch.cat([y, y[: len(y) // 2]])[: len(y)], "no integer rule|no polynomial|bytes"),
    ],
)
def test_an_unpredictable_step_has_a_reason_in_one_line(forward, words):
    one = case(forward)
    with pytest.raises(Unpredictable, match=words) as caught:
        footprint(one)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("cannot predict: ")


def test_errors_of_the_user_and_of_torch_are_named(monkeypatch):
    workload = make(perceptron, loss=lambda model, batch: model(batch[0]))
    with pytest.raises(InputError, match="0-d"):
        footprint(setting(setup(workload), capability=(8, 0)))
    monkeypatch.setattr("autobatch.footprint.fit.missing_parts", lambda: ["torch._C._gone"])
    with pytest.raises(Unpredictable, match=r"no torch\._C\._gone"):
        footprint(setting(setup(workload), capability=(8, 0)))


@settings(max_examples=50)
@given(recipes(), st.integers(1, 60 * MiB), st.integers(1, 90), st.booleans())
def test_the_largest_against_brute_force(recipe, limit, cap, caching):
    program = Program.fit([(2, trace_of(recipe, 2)), (3, trace_of(recipe, 3))])

    def allocator():
        return CachingAllocator(limit) if caching else CountingAllocator(limit)

    truth = [replay(program.at(m), allocator()).fits for m in range(1, cap + 1)]
    answer = Fitting([program], allocator).largest(cap)
    # No gap is too long for the sizes below the bound, which are all replayed here.
    assert answer == max((m for m, fits in enumerate(truth, 1) if fits), default=0)


def test_the_largest_above_a_gap_is_found():
    """As on torch's CUDA allocator, 700 fits, 769 to 778 do not, and 1280 is the largest that does."""

    class Gapped(CachingAllocator):
        def malloc(self, size):
            if size > 1280 * KiB or 768 * KiB < size <= 1000 * KiB:
                raise BudgetExceeded(requested=size, attempted=size, allocated=0, reserved=0, limit=20 * MiB)
            return super().malloc(size)

    program = Program.fit([(1, trace(KiB)), (2, trace(2 * KiB))])
    assert Fitting([program], lambda: Gapped(20 * MiB)).largest(50_000) == 1280


def test_the_rest_is_searched_if_no_size_near_the_bound_fits(monkeypatch):
    monkeypatch.setattr(fittings, "SCANNED_EVENTS", 10)
    program = Program.fit([(1, trace(KiB)), (2, trace(2 * KiB))])
    wasteful = AllocatorConfig(expandable_segments=False)
    found = Fitting([program], lambda: CachingAllocator(3 * MiB, wasteful)).largest(5000)
    fits = [replay(program.at(m), CachingAllocator(3 * MiB, wasteful)).fits for m in (found, found + 1)]
    assert fits == [True, False]


def test_the_largest_of_two_orders_fits_in_both():
    def allocator(limit=1000):
        return CountingAllocator(limit)

    program = Program.fit([(1, trace(100)), (2, trace(200))])
    assert Fitting([program], allocator).largest(50) == 10
    assert Fitting([program], allocator).largest(7) == 7
    assert Fitting([program], lambda: allocator(99)).largest(7) == 0
    other = Program.fit([(1, trace(130)), (2, trace(250))])
    assert Fitting([program, other], allocator).largest(50) == (1000 - 10) // 120
    assert Fitting([other, program], allocator).largest(50) == (1000 - 10) // 120
