"""Overflows in fp16 skip a step and halve the loss scale, and change nothing else. They need no GPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from autobatch.core.errors import NonFiniteError
from tests.support.overflow import TARGET, batch_ids, flagged, fp16_loop, loss
from tests.support.training import mean_loss, network, weights


def test_an_overflow_in_micro_batch_2_of_4_skips_the_step_and_nothing_else() -> None:
    clean = fp16_loop(flagged(set()))
    bad = batch_ids(clean, 1)[2]
    loop = fp16_loop(flagged({bad}), ema=0.9)
    run = loop.run()
    next(run)
    scaler = loop.train_state.scaler
    before = weights(loop.train_state.model)
    averages = [tensor.clone() for tensor in loop.train_state.average.tensors()]
    scale = scaler.get_scale()
    schedule = loop.schedules[0].state_dict()
    skipped = next(run)
    assert not skipped.applied
    assert skipped.grad_norm is None
    assert math.isfinite(skipped.loss)
    assert torch.equal(weights(loop.train_state.model), before)
    assert all(map(torch.equal, loop.train_state.average.tensors(), averages))
    assert scaler.get_scale() == scale / 2
    assert loop.schedules[0].state_dict() == schedule
    assert (loop.batches_seen, loop.steps_applied, skipped.samples) == (2, 1, 2 * TARGET)
    after = next(run)
    assert after.applied
    assert scaler.get_scale() == scale / 2
    assert (loop.batches_seen, loop.steps_applied) == (3, 2)
    assert after.learning_rate == skipped.learning_rate == 0.05


class Two(nn.Module):
    """Two networks, of which one may overflow, and a third that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = network(torch.float32)
        self.second = network(torch.float32)
        self.unused = nn.Linear(1, 1)


def two_losses(model: Two, batch) -> torch.Tensor:
    inputs, labels, _ = batch
    return mean_loss(model.first, (inputs, labels)) + loss(model.second, batch)


def by_part(names: list[str]):
    models: list[Two] = []

    def build() -> Two:
        models.append(Two())
        return models[-1]

    def optimizers(params, lr):
        list(params)
        return [torch.optim.SGD(getattr(models[-1], name).parameters(), lr=lr) for name in names]

    return {"model": build, "optimizer": optimizers, "loss": two_losses}


def test_of_two_optimizers_only_the_one_that_overflowed_skips_its_step() -> None:
    bad = batch_ids(fp16_loop(flagged(set())), 1)[5]
    loop = fp16_loop(flagged({bad}), **by_part(["first", "second"]))
    loop.train_state.max_grad_norm = 0.01
    run = loop.run()
    next(run)
    first, second = weights(loop.train_state.model.first), weights(loop.train_state.model.second)
    scale = loop.train_state.scaler.get_scale()
    record = next(run)
    moved = (weights(loop.train_state.model.first) - first).norm()
    assert record.applied
    # Clipped by the norm of the gradients that are applied, not to zero by the infinite one.
    assert moved == pytest.approx(0.01 * 0.05, rel=1e-2)
    assert torch.equal(weights(loop.train_state.model.second), second)
    assert loop.train_state.scaler.get_scale() == scale / 2
    assert [schedule.last_epoch for schedule in loop.schedules] == [2, 1]
    assert next(run).applied


def test_gradients_that_overflow_at_every_scale_end_the_run() -> None:
    loop = fp16_loop(flagged(set(range(32))))
    loop.train_state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-9)
    run = loop.run()
    assert not next(run).applied
    before = weights(loop.train_state.model)
    with pytest.raises(NonFiniteError, match=r"gradient of step 2 is not finite at a loss scale of"):
        next(run)
    assert torch.equal(weights(loop.train_state.model), before)


def test_a_fused_optimizer_skips_an_overflow_too() -> None:
    bad = batch_ids(fp16_loop(flagged(set())), 1)[2]
    loop = fp16_loop(
        flagged({bad}), optimizer=lambda params, lr: torch.optim.AdamW(params, lr=lr, fused=True)
    )
    run = loop.run()
    next(run)
    before = weights(loop.train_state.model)
    assert not next(run).applied
    assert torch.equal(weights(loop.train_state.model), before)
    assert next(run).applied
    assert not torch.equal(weights(loop.train_state.model), before)
