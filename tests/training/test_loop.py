"""The loop against whole batches: weights, records, schedules and warm-up."""

from __future__ import annotations

import math
from itertools import count

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from autobatch import InputError, Loss, NonFiniteError
from autobatch.device.allocator.ledger import MemoryStats
from autobatch.device.cpu import SilentMeter
from autobatch.training.loop import READING_INTERVAL
from tests.support.training import (
    INFO_NCE,
    TOKENS,
    Rows,
    apart,
    make_loop,
    make_workload,
    mean_loss,
    points,
    reference,
    weights,
)


@pytest.mark.parametrize("last_batch", ["carry", "flush", "drop"])
@pytest.mark.parametrize("micro_batch", [1, 3, 7, 50])
def test_a_run_equals_training_on_whole_batches(last_batch: str, micro_batch: int) -> None:
    """24 samples in batches of 7 over 3 epochs, with momentum and weight decay."""
    workload = make_workload(
        optimizer=lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=0.01)
    )
    loop = make_loop(
        workload, target_batch=7, micro_batch=micro_batch, steps=None, epochs=3, last_batch=last_batch
    )
    records = list(loop.run())
    batches = [batch.ids for batch in loop.sampler.batches()]
    expected, losses = reference(workload, batches, mean_loss)
    assert apart(weights(loop.train_state.model), expected) <= 1e-12
    assert [record.loss for record in records] == pytest.approx(losses, rel=1e-12)
    assert len(records) == loop.sampler.total == {"carry": 11, "flush": 12, "drop": 9}[last_batch]
    assert records[-1].samples == sum(map(len, batches))


@pytest.mark.parametrize("last_batch", ["carry", "flush", "drop"])
@pytest.mark.parametrize("micro_batch", [1, 3, 50])
def test_a_run_with_a_loss_over_the_whole_batch_equals_training_on_whole_batches(
    last_batch, micro_batch
) -> None:
    """The last batch may be short, and its loss is over fewer samples then."""
    workload = make_workload(
        loss=INFO_NCE, optimizer=lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9)
    )
    loop = make_loop(
        workload, target_batch=7, micro_batch=micro_batch, steps=None, epochs=3, last_batch=last_batch
    )
    records = list(loop.run())
    batches = [batch.ids for batch in loop.sampler.batches()]
    expected, losses = reference(workload, batches, INFO_NCE)
    assert apart(weights(loop.train_state.model), expected) <= 1e-12
    assert [record.loss for record in records] == pytest.approx(losses, rel=1e-12)
    assert loop.noise.estimate().batches == 0


@pytest.mark.parametrize(
    ("samples", "epochs", "last_batch", "steps"),
    [
        (5, 1, "flush", 2),
        (5, 1, "carry", 2),
        (5, 1, "drop", 1),
        (3, 2, "flush", 2),
        (3, 2, "carry", 2),
        (3, 2, "drop", 0),
    ],
)
def test_a_short_last_batch_is_a_full_step(samples: int, epochs: int, last_batch: str, steps: int) -> None:
    """Each sample and step has gradient 1: with 5 samples, a loop that divides by 4 ends at -1.25."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

    workload = make_workload(
        model=One,
        train_data=Rows(torch.ones(samples, dtype=torch.float64)),
        loss=lambda model, batch: (model.weight * batch[0]).mean(),
        learning_rate=1.0,
    )
    loop = make_loop(
        workload, target_batch=4, micro_batch=1, steps=None, epochs=epochs, last_batch=last_batch
    )
    assert len(list(loop.run())) == loop.steps_applied == steps
    assert float(loop.train_state.model.weight.detach()) == -steps


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


@pytest.mark.parametrize(
    ("rate", "error"), [(math.nan, NonFiniteError), (math.inf, NonFiniteError), (-0.1, InputError)]
)
@pytest.mark.parametrize("kind", [float, torch.as_tensor])
@pytest.mark.parametrize("warmup", [None, 60])
def test_an_invalid_learning_rate_is_named_before_its_step(rate: float, error, kind, warmup) -> None:
    """The schedule breaks after the second step: the third is not taken, and no sample is blamed."""

    class Broken(LambdaLR):
        def step(self) -> None:
            super().step()
            if self.last_epoch == 2:
                self.optimizer.param_groups[1]["lr"] = kind(rate)

    def optimizer(params, lr):
        first, *rest = params
        return torch.optim.SGD([{"params": [first]}, {"params": rest}], lr=lr)

    workload = make_workload(
        optimizer=optimizer, schedule=lambda optimizer, _: Broken(optimizer, lambda step: 1.0)
    )
    loop = make_loop(workload, target_batch=6, steps=4, warmup_samples=warmup)
    run = loop.run()
    next(run), next(run)
    before = weights(loop.train_state.model)
    with pytest.raises(error, match=r"the learning rate of step 3 is .* group 2 of 2.*schedule") as caught:
        next(run)
    assert "sample" not in str(caught.value)
    assert torch.equal(weights(loop.train_state.model), before)


def test_a_non_finite_gradient_of_one_optimizer_stops_all() -> None:
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


def test_a_batch_without_items_is_seen_and_its_step_not_applied() -> None:
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


@pytest.mark.parametrize("fields", [{}, TOKENS], ids=["mean", "tokens"])
@pytest.mark.parametrize("micro_batch", [1, 5, 7])
def test_records_do_not_depend_on_the_micro_batch(micro_batch: int, fields: dict) -> None:
    """Against one pass over each whole batch, written by hand; each step takes half a second of the clock."""
    workload = make_workload(**fields)
    loop = make_loop(workload, micro_batch=micro_batch, target_batch=7, steps=None, epochs=1)
    ticks = count(step=0.5)
    loop.clock = lambda: next(ticks)
    model = make_loop(workload).train_state.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for record, batch in zip(loop.run(), loop.sampler.batches(), strict=True):
        samples = torch.utils.data.default_collate([workload.train_data[index] for index in batch.ids])
        found = workload.loss(model, samples)
        total, items = found if isinstance(found, Loss) else (found * len(batch.ids), len(batch.ids))
        optimizer.zero_grad()
        mean = total / items
        mean.backward()
        assert record.loss == pytest.approx(mean.item(), rel=1e-12)
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        assert record.grad_norm == pytest.approx(float(norm), rel=1e-12)
        assert record.count == float(items)
        assert record.seconds == 0.5
        assert record.items_per_s == 2 * float(items)
        assert record.samples_per_s == 2 * len(batch.ids)
        optimizer.step()


def test_gradients_that_the_model_came_with_are_not_part_of_the_first_batch() -> None:
    loop, other = make_loop(make_workload(), steps=1), make_loop(make_workload(), steps=1)
    for parameter in other.train_state.parameters:
        parameter.grad = torch.ones_like(parameter)
    list(loop.run()), list(other.run())
    assert torch.equal(weights(loop.train_state.model), weights(other.train_state.model))


def halving(optimizer: torch.optim.Optimizer, _: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.5**step)


def by_hand(rates: list[float], batches: list[list[int]]) -> torch.Tensor:
    """Train with plain SGD over whole batches, with these learning rates."""
    loop = make_loop(make_workload())
    model, columns = loop.train_state.model, points().columns
    for rate, ids in zip(rates, batches, strict=True):
        model.zero_grad()
        mean_loss(model, [column[ids] for column in columns]).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(rate * parameter.grad)
    return weights(model)


@pytest.mark.parametrize("schedule", [None, halving])
@pytest.mark.parametrize(("target", "steps"), [(24, 5), (7, 12)])
def test_warmup_grows_with_the_samples_on_top_of_the_schedule(target, steps, schedule) -> None:
    workload = make_workload(schedule=schedule)
    loop = make_loop(workload, target_batch=target, steps=steps, warmup_samples=60)
    ids = [batch.ids for batch in loop.sampler.batches()]
    records = list(loop.run())
    plain = [0.1 * (0.5**step if schedule else 1.0) for step in range(steps)]
    expected = [rate * min(1.0, (step + 1) * target / 60) for step, rate in enumerate(plain)]
    assert [record.learning_rate for record in records] == pytest.approx(expected, rel=1e-15)
    assert apart(weights(loop.train_state.model), by_hand(expected, ids)) < 1e-12
    # Schedules and checkpoints see the learning rate without the warm-up.
    left = loop.train_state.optimizers[0].param_groups[0]["lr"]
    assert left == 0.1 * (0.5**steps if schedule else 1.0)


class Numbered(SilentMeter):
    """A meter whose readings are numbered."""

    readings = 0

    def stats(self) -> MemoryStats:
        self.readings += 1
        return MemoryStats(None, None, self.readings, None, None)


def test_memory_is_read_in_all_first_steps_then_in_one_of_many() -> None:
    loop = make_loop(make_workload(), steps=4 * READING_INTERVAL, meter=Numbered())
    read = [record.peak_allocated_bytes for record in loop.run()]
    fresh = [step for step, one in enumerate(read, 1) if step == 1 or one != read[step - 2]]
    assert fresh == [*range(1, READING_INTERVAL + 1), *(n * READING_INTERVAL for n in (2, 3, 4))]
