"""Steps that are not finite and may be skipped, as if their samples were not there."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from autobatch import NonFiniteError
from tests.support.kinds import Overflow
from tests.support.training import (
    Rows,
    amsgrad,
    apart,
    averages,
    make_loop,
    make_workload,
    mean_loss,
    network,
    points,
    reference,
    weights,
)

TARGET, STEPS = 6, 4
"""One epoch of 24 samples."""


def flawed_loss(model: nn.Module, batch) -> torch.Tensor:
    """Compute a loss that is not finite for flagged samples: 1 in the loss, 2 in the gradient alone."""
    inputs, labels, flags = batch
    loss = Overflow.apply(mean_loss(model, (inputs, labels)), flags == 2)
    return loss * math.nan if (flags == 1).any() else loss


def order() -> list[list[int]]:
    return [
        batch.ids for batch in make_loop(make_workload(), target_batch=TARGET, steps=STEPS).sampler.batches()
    ]


def data(kind: int, *batches: int, dtype: torch.dtype = torch.float64) -> Rows:
    """Flag the third sample of some batches of the first epoch."""
    flags = torch.zeros(24, dtype=torch.int64)
    flags[[order()[index][2] for index in batches]] = kind
    return Rows(*points(dtype=dtype).columns, flags)


def halving(optimizer: torch.optim.Optimizer, _: int) -> StepLR:
    return StepLR(optimizer, 1, gamma=0.5)


def open_loop(samples: Rows, *, model=network, schedule=halving, **options):
    fields = {"model": model, "loss": flawed_loss, "optimizer": amsgrad, "schedule": schedule}
    options = {"target_batch": TARGET, "micro_batch": 2, "steps": STEPS, "on_nonfinite": "skip", **options}
    return make_loop(make_workload(train_data=samples, **fields), **options)


def normalised() -> nn.Module:
    """Make a model whose first layer keeps statistics of its inputs."""
    return nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


FP16 = {"model": lambda: network(torch.float32), "precision": "fp16", "on_nonfinite": "raise"}
"""Options of a loop in which an overflow of the loss scale skips a step, and halves the scale."""


@pytest.mark.parametrize("kind", ["loss", "gradient", "loss scale"])
def test_a_skipped_step_changes_nothing_but_the_counters(kind: str) -> None:
    """The third sample of the second batch is bad."""
    if kind == "loss scale":
        loop = open_loop(data(2, 1, dtype=torch.float32), ema=0.9, **FP16)
    else:
        samples = data(1 if kind == "loss" else 2, 1)
        samples.columns[0][order()[1][2]] = math.inf if kind == "loss" else 3.0
        loop = open_loop(samples, model=normalised, ema=0.9)
    train_state, target = loop.train_state, loop.sampler.target_batch
    run = loop.run()
    next(run)

    def state() -> list[torch.Tensor]:
        of_optimizer = train_state.optimizers[0].state.values()
        moments = [one[name].double().sum() for one in of_optimizer for name in one]
        return [weights(train_state.model), *averages(train_state.average), *moments]

    before, schedule = [tensor.clone() for tensor in state()], loop.schedules[0].state_dict()
    scale = train_state.scaler.get_scale()
    record = next(run)
    assert not record.applied
    assert (record.loss is None) == (kind == "loss")
    assert record.grad_norm is None
    assert all(torch.equal(one, two) for one, two in zip(state(), before, strict=True))
    assert loop.schedules[0].state_dict() == schedule
    assert (loop.batches_seen, loop.steps_applied, record.samples) == (2, 1, 2 * target)
    after = next(run)
    assert after.applied
    assert after.learning_rate == record.learning_rate
    if train_state.scaler.is_enabled():
        assert train_state.scaler.get_scale() == scale / 2
    assert [record.applied for record in run] == [True]
    assert all(torch.isfinite(tensor).all() for tensor in state())


def test_the_rest_of_the_run_equals_one_without_the_skipped_batches() -> None:
    samples = data(1, 1, 2)
    loop = open_loop(samples, schedule=None)
    assert [record.applied for record in loop.run()] == [True, False, False, True]
    plain = make_workload(train_data=samples, optimizer=amsgrad)
    batches = [order()[0], order()[3]]
    expected, _ = reference(plain, batches, lambda model, batch: mean_loss(model, batch[:2]))
    assert apart(weights(loop.train_state.model), expected) <= 1e-12


def test_the_fourth_skipped_step_in_a_row_ends_the_run() -> None:
    loop = open_loop(data(1, 0, 1, 2, 3))
    run = loop.run()
    assert [next(run).applied for _ in range(3)] == [False] * 3
    with pytest.raises(NonFiniteError, match=r"step 4 is not finite \(after 3 skipped steps in a row"):
        next(run)
    assert (loop.batches_seen, loop.steps_applied) == (3, 0)


def test_gradients_that_overflow_at_every_scale_end_the_run() -> None:
    loop = open_loop(data(2, 0, 1, 2, 3, dtype=torch.float32), **FP16)
    loop.train_state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-9)
    run = loop.run()
    assert not next(run).applied
    with pytest.raises(NonFiniteError, match=r"gradient of step 2 is not finite at a loss scale of"):
        next(run)
