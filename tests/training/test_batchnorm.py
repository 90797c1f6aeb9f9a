"""BatchNorm in micro-batches against whole batches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autobatch.planning import micro_batches
from autobatch.training.batchnorm import (
    batch_norm_notes,
    batch_norms,
    rescaled_momentum,
    smallest_micro_batch,
)
from autobatch.workload.order import GlobalBatchSampler
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


def test_the_momentum_is_restored_after_an_error() -> None:
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


def test_the_note_on_batch_norm_has_the_numbers() -> None:
    sampler = GlobalBatchSampler(samples=24, target_batch=24, seed=0, steps=3)
    model = nn.Sequential(nn.BatchNorm1d(5), network())
    (note,) = batch_norm_notes(model, sampler, 7)
    assert "1 BatchNorm layer computes its statistics over micro-batches of 6 samples" in note
    assert "not over the batch of 24" in note
    assert (
        "move 4 times per step: to match the whole batch, set their momentum to 0.026 instead of 0.1" in note
    )
    assert note.endswith("(--bn-momentum auto does this)")
    assert batch_norm_notes(model, sampler, 24) == []
    assert batch_norm_notes(network(), sampler, 7) == []


@pytest.mark.parametrize("last_batch", ["carry", "flush", "drop"])
def test_the_smallest_micro_batch_is_that_of_all_batches_of_the_run(last_batch: str) -> None:
    for samples in range(4, 30):
        for target in range(1, samples + 3):
            for epochs in (1, 2, 3):
                sampler = GlobalBatchSampler(
                    samples=samples, target_batch=target, seed=0, epochs=epochs, last_batch=last_batch
                )
                if sampler.total:
                    expected = min(
                        size for i in range(sampler.total) for size in micro_batches(sampler.size(i), 4)
                    )
                    assert smallest_micro_batch(sampler, 4) == expected
