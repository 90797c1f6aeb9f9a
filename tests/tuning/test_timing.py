"""Times of micro-batches, optimizer steps and fetching, by a clock that tests advance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autobatch.device.host import usable_cores
from autobatch.tuning.measure import Timing, fetch_share, time_steps
from tests.support.kinds import Augmented
from tests.support.training import mean_loss, points
from tests.support.trials import (
    DEFAULTS,
    Time,
    context_of,
    make_runner,
    setup_of,
    signed,
    timed_fields,
    trial_setup,
)


def test_micro_batches_and_optimizer_steps_are_timed_apart() -> None:
    time = Time()
    made = trial_setup(clock=time, **timed_fields(time))
    assert time_steps(made, [8] * 8, 0.0) == Timing(micro=8.0, step=5.0, setup=0.0)
    assert Timing(8.0, 5.0, 300.0).a_step(8, planned_steps=100) == 8 * 8 + 5 + 3
    found = make_runner(made).measure(DEFAULTS)
    assert found.samples_per_s == pytest.approx(64 / (8 * 8 + 5))
    assert (found.micro_batch, found.feasible) == (8, True)


@pytest.mark.parametrize(("a_fetch", "share"), [(1.0, 0.25), (9.0, 0.75), (0.0001, 0.0)])
def test_the_share_of_fetching_is_measured(a_fetch: float, share: float) -> None:
    now = [0.0]

    class Timed(Augmented):
        def __getitem__(self, index: int):
            now[0] += a_fetch
            return super().__getitem__(index)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        now[0] += 3.0 * len(batch[0])
        return mean_loss(model, batch)

    workload = signed(set(), loss=loss, train_data=Timed(*points(64, dtype=torch.float32).columns))
    clocked = replace(setup_of(workload), clock=lambda: now[0])
    assert fetch_share(clocked, 8) == pytest.approx(share)
    here = context_of(clocked)
    assert (here.cores, here.loader) == (usable_cores(), None)
    assert here.fetch_share == pytest.approx(share if usable_cores() > 1 else 0.0)


def test_samples_are_drawn_on_the_host_whatever_the_default_device() -> None:
    with torch.device("meta"):
        assert fetch_share(replace(setup_of(signed(set())), clock=lambda: 0.0), 8) == 0.0


def test_the_share_of_fetching_is_zero_if_memory_runs_out() -> None:
    ticks = iter(range(10**6))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    clocked = replace(setup_of(signed(set(), loss=loss)), clock=lambda: float(next(ticks)))
    assert fetch_share(clocked, 8) == 0.0
