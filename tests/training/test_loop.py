"""The loop over whole runs: windows, figures, schedules, and losses that are not finite."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import count

import pytest
import torch
from torch import nn

from autobatch.core.errors import NonFiniteError
from autobatch.workload.contract import Loss
from tests.support.training import (
    INFO_NCE,
    Rows,
    apart,
    language_model,
    make_loop,
    make_workload,
    mean_loss,
    network,
    points,
    reference,
    token_loss,
    tokens,
    weights,
)


@pytest.mark.parametrize("last_batch", ["carry", "flush", "drop"])
@pytest.mark.parametrize("micro_batch", [1, 3, 7, 50])
def test_a_run_is_that_of_whole_windows(last_batch: str, micro_batch: int) -> None:
    """24 samples by windows of 7 over 3 epochs, momentum and decay included."""
    workload = make_workload(
        optimizer=lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=0.01)
    )
    loop = make_loop(
        workload, target_batch=7, micro_batch=micro_batch, steps=None, epochs=3, last_batch=last_batch
    )
    records = list(loop.run())
    windows = [window.ids for window in loop.sampler.batches()]
    expected, losses = reference(workload, windows, mean_loss)
    assert apart(weights(loop.train_state.model), expected) <= 1e-12
    assert [record.loss for record in records] == pytest.approx(losses, rel=1e-12)
    assert len(records) == loop.sampler.total == {"carry": 11, "flush": 12, "drop": 9}[last_batch]
    assert records[-1].samples == sum(map(len, windows))


@pytest.mark.parametrize("last_batch", ["carry", "flush", "drop"])
@pytest.mark.parametrize("micro_batch", [1, 3, 50])
def test_a_run_with_a_loss_over_the_whole_batch_is_that_of_whole_windows(last_batch, micro_batch) -> None:
    """The last window may be short: its loss is over fewer samples then."""
    workload = make_workload(
        loss=INFO_NCE, optimizer=lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9)
    )
    loop = make_loop(
        workload, target_batch=7, micro_batch=micro_batch, steps=None, epochs=3, last_batch=last_batch
    )
    records = list(loop.run())
    windows = [window.ids for window in loop.sampler.batches()]
    expected, losses = reference(workload, windows, INFO_NCE)
    assert apart(weights(loop.train_state.model), expected) <= 1e-12
    assert [record.loss for record in records] == pytest.approx(losses, rel=1e-12)
    assert loop.noise.estimate().batches == 0


@pytest.mark.parametrize(("last_batch", "expected"), [("flush", -2.0), ("carry", -2.0), ("drop", -0.0)])
def test_a_short_last_window_is_a_whole_step(last_batch: str, expected: float) -> None:
    """Five samples by fours, gradient 1 each: loops that divide by 4 all the same end at -1.25."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

    workload = make_workload(
        model=One,
        train_data=Rows(torch.ones(5, dtype=torch.float64)),
        loss=lambda model, batch: (model.weight * batch[0]).mean(),
        learning_rate=1.0,
    )
    loop = make_loop(workload, target_batch=4, micro_batch=1, steps=None, epochs=1, last_batch=last_batch)
    steps = len(list(loop.run()))
    assert float(loop.train_state.model.weight.detach()) == (expected if last_batch != "drop" else -1.0)
    assert steps == (1 if last_batch == "drop" else 2)


def test_a_window_larger_than_the_data_takes_it_several_times() -> None:
    loop = make_loop(make_workload(), target_batch=60, micro_batch=7, steps=2)
    expected, _ = reference(loop.workload, [w.ids for w in loop.sampler.batches()], mean_loss)
    assert [record.samples for record in loop.run()] == [60, 120]
    assert apart(weights(loop.train_state.model), expected) <= 1e-12


def test_the_schedule_ends_exactly_with_the_run() -> None:
    seen = []

    def schedule(optimizer, steps):
        seen.append(steps)
        return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)

    loop = make_loop(make_workload(schedule=schedule), target_batch=7, steps=None, epochs=3, micro_batch=3)
    records = list(loop.run())
    assert seen == [11] == [len(records)]
    rates = [record.learning_rate for record in records]
    assert rates == pytest.approx([0.1 * (1 - k / 11) for k in range(11)])
    assert loop.train_state.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.0)


def spoiled(samples: dict[int, float], dtype=torch.float32) -> Rows:
    data = points(24, dtype=dtype)
    for index, value in samples.items():
        data.columns[0][index, 0] = value
    return data


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loss_that_is_not_finite_stops_before_the_step_and_names_the_sample(value, precision) -> None:
    workload = make_workload(model=lambda: network(torch.float32))
    bad = list(make_loop(workload, target_batch=6, steps=4).sampler.batches())[2].ids[4]
    workload = make_workload(model=lambda: nn.Sequential(nn.Linear(5, 3)), train_data=spoiled({bad: value}))
    loop = make_loop(workload, target_batch=6, micro_batch=4, steps=4, precision=precision)
    run = loop.run()
    next(run)
    next(run)
    before = weights(loop.train_state.model)
    random_state = torch.get_rng_state()
    with pytest.raises(
        NonFiniteError, match=rf"loss \(nan\) of step 3 .* sample {bad} alone gives a non-finite loss"
    ):
        next(run)
    assert torch.equal(weights(loop.train_state.model), before)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert loop.batches_seen == loop.steps_applied == 2


def test_of_a_loss_over_the_whole_batch_the_sample_is_named_whose_row_is_not_finite() -> None:
    """A row by itself: the loss of a single sample may not even be defined."""

    def undefined_alone(model, rows):
        return INFO_NCE.loss(model, rows) + rows.std(0).mean()

    workload = make_workload(
        model=lambda: network(torch.float32),
        train_data=spoiled({11: math.nan}),
        loss=replace(INFO_NCE, loss=undefined_alone),
    )
    loop = make_loop(workload, target_batch=24, micro_batch=5, steps=1)
    with pytest.raises(
        NonFiniteError, match=r"loss \(nan\) of step 1 .* sample 11 alone gives a non-finite row"
    ):
        next(loop.run())


def test_a_gradient_that_is_not_finite_stops_before_the_step_with_a_finite_loss() -> None:
    def loss(model, batch):
        return mean_loss(model, batch) + (model[0].weight * 0.0).abs().sqrt().sum()

    loop = make_loop(make_workload(loss=loss), target_batch=6, steps=4)
    before = weights(loop.train_state.model)
    with pytest.raises(
        NonFiniteError, match="the gradient of step 1 is not finite, so the step was not applied: samples"
    ):
        next(loop.run())
    assert torch.equal(weights(loop.train_state.model), before)


def test_a_gradient_that_is_not_finite_stops_the_other_optimizer_too() -> None:
    def loss(model, batch):
        return mean_loss(model, batch) + (model[0].weight * 0.0).abs().sqrt().sum()

    def optimizers(params, lr):
        params = list(params)
        return [torch.optim.SGD(params[:2], lr=lr), torch.optim.SGD(params[2:], lr=lr)]

    loop = make_loop(make_workload(loss=loss, optimizer=optimizers), target_batch=6, steps=4)
    before = weights(loop.train_state.model)
    with pytest.raises(NonFiniteError, match="the gradient of step 1"):
        next(loop.run())
    assert torch.equal(weights(loop.train_state.model), before)


def test_windows_that_count_nothing_are_counted_and_not_stepped() -> None:
    def loss(model, batch):
        return Loss(mean_loss(model, batch) * 0.0, 0)

    loop = make_loop(
        make_workload(
            loss=loss, schedule=lambda optimizer, steps: torch.optim.lr_scheduler.StepLR(optimizer, 1)
        ),
        steps=3,
    )
    records = list(loop.run())
    assert [(r.applied, r.loss, r.count) for r in records] == [(False, None, 0.0)] * 3
    assert (loop.batches_seen, loop.steps_applied, loop.schedules[0].last_epoch) == (3, 0, 0)


TOKENS = {"model": language_model, "train_data": tokens(), "loss": token_loss}


@pytest.mark.parametrize("fields", [{}, TOKENS], ids=["mean", "tokens"])
@pytest.mark.parametrize("micro_batch", [1, 5, 7])
def test_the_figures_do_not_depend_on_the_micro_batch(micro_batch: int, fields: dict) -> None:
    """Against one pass over each whole window, written by hand; half a second a window by the clock."""
    workload = make_workload(**fields)
    loop = make_loop(workload, micro_batch=micro_batch, target_batch=7, steps=None, epochs=1)
    ticks = count(step=0.5)
    loop.clock = lambda: next(ticks)
    model = make_loop(workload).train_state.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for record, window in zip(loop.run(), loop.sampler.batches(), strict=True):
        batch = torch.utils.data.default_collate([workload.train_data[index] for index in window.ids])
        found = workload.loss(model, batch)
        total, items = found if isinstance(found, Loss) else (found * len(window.ids), len(window.ids))
        optimizer.zero_grad()
        mean = total / items
        mean.backward()
        assert record.loss == pytest.approx(mean.item(), rel=1e-12)
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        assert record.grad_norm == pytest.approx(float(norm), rel=1e-12)
        assert record.count == float(items)
        assert record.seconds == 0.5
        assert record.items_per_s == 2 * float(items)
        assert record.samples_per_s == 2 * len(window.ids)
        optimizer.step()


def test_a_gradient_that_a_model_comes_with_is_no_part_of_the_first_window() -> None:
    loop, other = make_loop(make_workload(), steps=1), make_loop(make_workload(), steps=1)
    for parameter in other.train_state.parameters:
        parameter.grad = torch.ones_like(parameter)
    list(loop.run()), list(other.run())
    assert torch.equal(weights(loop.train_state.model), weights(other.train_state.model))
