"""BatchNorm's running averages in micro-batches against those of whole batches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autobatch.training.batchnorm import batch_norms, rescaled_momentum
from tests.support.faults import Fault, Quick, Watching
from tests.support.training import apart, make_loop, make_workload, network, points

SAMPLES, TARGET, STEPS = 1024, 512, 4


def norm_loop(micro_batch: int, *, auto: bool, momentum: float | None = 0.1, fault: Fault | None = None):
    data = points(SAMPLES)
    data.columns[0].mul_(2.0).add_(3.0)

    def build() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(5, momentum=momentum), network()).double()

    loop = make_loop(
        make_workload(model=build, train_data=data, learning_rate=1e-6),
        target_batch=TARGET,
        micro_batch=micro_batch,
        steps=STEPS,
        meter=Watching(fault),
        device=Quick(memory_budget="1GiB"),
    )
    if auto:
        loop.rescaled_norms = batch_norms(loop.train_state.model)
    return loop


def statistics(loop) -> torch.Tensor:
    norm = loop.train_state.model[0]
    return torch.cat([norm.running_mean, norm.running_var])


def trained(loop):
    for _ in loop.run():
        assert [norm.momentum for norm in loop.rescaled_norms] == [0.1] * len(loop.rescaled_norms)
    return loop


@pytest.mark.parametrize("micro_batch", [60, 128, 256, 512])
def test_running_statistics_are_within_two_percent_of_the_whole_batch(micro_batch: int) -> None:
    whole = statistics(trained(norm_loop(TARGET, auto=False)))
    assert apart(statistics(trained(norm_loop(micro_batch, auto=True))), whole) < 0.02
    if micro_batch < TARGET:
        assert apart(statistics(trained(norm_loop(micro_batch, auto=False))), whole) > 0.1


def test_they_are_when_memory_runs_out_and_there_are_more_micro_batches() -> None:
    whole = statistics(trained(norm_loop(TARGET, auto=False)))
    fault = Fault(20)
    loop = norm_loop(256, auto=True, fault=fault)
    seen = []
    with fault:
        for record in loop.run():
            assert loop.train_state.model[0].momentum == 0.1
            seen.append(record.accumulation_steps)
            fault.armed = record.step == 1
    assert seen == [2, 4, 4, 4]
    assert apart(statistics(loop), whole) < 0.02


def test_an_average_over_everything_is_left_alone() -> None:
    """Without a momentum every micro-batch weighs the same, and the mean is that of all samples."""
    loop = norm_loop(128, auto=True, momentum=None)
    list(loop.run())
    windows = list(loop.sampler.batches())
    inputs = torch.stack([loop.workload.train_data.columns[0][window.ids] for window in windows])
    assert apart(loop.train_state.model[0].running_mean, inputs.mean((0, 1))) <= 1e-12


def test_the_momentum_comes_back_after_an_error() -> None:
    norms = [
        nn.BatchNorm1d(2, momentum=0.3),
        nn.BatchNorm2d(2, momentum=None),
        nn.SyncBatchNorm(2, momentum=1.0),
    ]

    def fail() -> None:
        with rescaled_momentum(norms, 4):
            assert 1 - (1 - norms[0].momentum) ** 4 == pytest.approx(0.3)
            assert [norm.momentum for norm in norms[1:]] == [None, 1.0]
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [norm.momentum for norm in norms] == [0.3, None, 1.0]
