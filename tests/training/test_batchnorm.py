"""BatchNorm in micro-batches against whole batches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

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
        loop.rescaled_norms = [loop.train_state.model[0]]
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


def test_running_statistics_follow_the_number_of_micro_batches_after_a_recovery() -> None:
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


def test_a_cumulative_average_is_left_alone() -> None:
    """Without a momentum every micro-batch has the same weight, so the mean is that of all samples."""
    loop = norm_loop(128, auto=True, momentum=None)
    list(loop.run())
    batches = list(loop.sampler.batches())
    inputs = torch.stack([loop.workload.train_data.columns[0][batch.ids] for batch in batches])
    assert apart(loop.train_state.model[0].running_mean, inputs.mean((0, 1))) <= 1e-12
