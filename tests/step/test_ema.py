"""The average of the weights: its arithmetic, what must not move it, and the memory it takes."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autobatch.core.errors import RestartSmallerError
from autobatch.core.units import GiB
from autobatch.device.allocator.trace import FREE
from autobatch.device.cpu import CpuDevice
from autobatch.device.host import HostMemory
from autobatch.footprint.explain import explain
from autobatch.footprint.predict import footprint
from autobatch.footprint.trace_step import Setting, record
from autobatch.probing.attempt import ATTEMPT_STEPS, TrainSetup, attempt
from autobatch.step.ema import WeightAverage
from autobatch.workload.data import WorstCaseSampler
from tests.support.overflow import batch_ids, flagged, fp16_loop
from tests.support.step_workloads import WORKLOADS
from tests.support.training import Rows, apart, make_loop, make_workload, network, points, weights

DECAY = 0.9


def flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


@pytest.mark.parametrize("micro_batch", [3, 24])
def test_it_is_the_sum_written_out(micro_batch: int) -> None:
    loop = make_loop(make_workload(), target_batch=7, micro_batch=micro_batch, steps=6, ema=DECAY)
    seen = [weights(loop.train_state.model)]
    seen += [weights(loop.train_state.model) for _ in loop.run()]
    shares = [DECAY ** (len(seen) - 1), *((1 - DECAY) * DECAY**age for age in reversed(range(6)))]
    expected = sum(share * one for share, one in zip(shares, seen, strict=True))
    assert apart(flat(loop.train_state.average.tensors()), expected) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_steps_too_small_for_16_bits_are_not_lost(dtype: torch.dtype) -> None:
    """1 towards 2 by a thousandth: in bf16 the average would stay at 1."""
    parameter = nn.Parameter(torch.ones(3, dtype=dtype))
    average = WeightAverage([parameter], 0.999)
    parameter.data.fill_(2.0)
    for _ in range(100):
        average.update()
    (found,) = average.tensors()
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert found.tolist() == pytest.approx([2.0 - 0.999**100] * 3, rel=1e-5)


def test_nothing_waits_for_the_device() -> None:
    class NoReading(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func is not torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    average = WeightAverage([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2).bfloat16())], 0.5)
    with NoReading():
        average.update()


def test_an_overflow_leaves_it_untouched() -> None:
    bad = batch_ids(fp16_loop(flagged(set())), 1)[2]
    loop = fp16_loop(flagged({bad}), ema=DECAY)
    run = loop.run()
    next(run)
    before = flat(loop.train_state.average.tensors())
    assert not next(run).applied
    assert torch.equal(flat(loop.train_state.average.tensors()), before)
    assert next(run).applied
    assert not torch.equal(flat(loop.train_state.average.tensors()), before)


def test_what_is_unfrozen_on_the_way_is_averaged_from_there_on() -> None:
    frozen, free = nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.zeros(2))
    average = WeightAverage([frozen, free], 0.5)
    assert len(average.tensors()) == 1, "what never moves costs nothing"
    frozen.requires_grad_()
    for value in (3.0, 5.0):
        frozen.data.fill_(value)
        average.update()
    assert average.tensors()[1].tolist() == [4.0, 4.0]
    other = WeightAverage([nn.Parameter(torch.ones(2), requires_grad=False), free], 0.5)
    other.load_state_dict(average.state_dict())
    assert [tensor.tolist() for tensor in other.tensors()] == [[4.0, 4.0], [0.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_swapped_in_it_is_the_model_and_the_very_weights_come_back(dtype: torch.dtype) -> None:
    model = network(dtype)
    average = WeightAverage(list(model.parameters()), 0.9)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter))
    average.update()
    places = [parameter.data_ptr() for parameter in model.parameters()]
    before = weights(model)
    kept = flat(average.tensors())
    with suppress(KeyError), average.swapped_in():
        expected = flat(tensor.to(dtype) for tensor in average.tensors())
        assert torch.equal(weights(model), expected)
        assert not torch.equal(expected, before)
        raise KeyError
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert torch.equal(weights(model), before)
    assert torch.equal(flat(average.tensors()), kept)


def test_out_of_memory_while_it_moves_is_not_run_again(monkeypatch) -> None:
    """The weights have moved by then: a second step would count the window twice."""
    loop = make_loop(make_workload(), ema=DECAY)

    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(loop.train_state.average, "update", fail)
    with pytest.raises(RestartSmallerError, match="inside the optimizer step"):
        next(loop.run())


def setup(workload, ema: float | None) -> TrainSetup:
    torch.manual_seed(0)
    device = CpuDevice(memory_budget=GiB, memory=HostMemory(8 * GiB, 8 * GiB, "made up"))
    return TrainSetup(
        workload=workload,
        model=workload.model(),
        device=device,
        worst_case=WorstCaseSampler(workload),
        precision="fp32",
        ema=ema,
    )


def setting(of: TrainSetup) -> Setting:
    return Setting(
        workload=of.workload,
        model=of.model,
        batch_of=of.worst_case.batch,
        precision=of.precision,
        capability=None,
        steps=ATTEMPT_STEPS,
        ema=of.ema,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_probe_and_a_trace_count_its_memory(dtype: torch.dtype) -> None:
    data = Rows(points(dtype=torch.float32).columns[0].to(dtype), points().columns[1])
    workload = make_workload(model=lambda: network(dtype), train_data=data)
    with_it, without = setup(workload, DECAY), setup(workload, None)
    elements = sum(parameter.numel() for parameter in with_it.model.parameters())
    found = record(setting(with_it), 3)
    assert found.trace == attempt(with_it, 3).trace.canonical()
    assert (
        sum(
            size
            for block, size in found.trace.events
            if size != FREE and found.labels[block].kind == "averaged weights"
        )
        == 4 * elements
    )
    more, less = (attempt(one, 3).attempt.peak_allocated_bytes for one in (with_it, without))
    assert more - less >= 4 * elements
    if dtype == torch.float32:
        assert more - less == 4 * elements


def test_where_the_memory_goes_names_it() -> None:
    of = setup(WORKLOADS["transformer"](), DECAY)
    elements = sum(parameter.numel() for parameter in of.model.parameters())
    told = explain(footprint(setting(of)), 4)
    assert told.by_kind["averaged weights"] == 4 * elements
    assert "averaged weights" in told.text()
