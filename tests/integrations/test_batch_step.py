"""The step of one batch in the user's loop: what counts, what is clipped, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import autobatch
from autobatch.core.errors import InputError, NonFiniteError
from autobatch.integrations.batch_step import Batch
from autobatch.workload.contract import Loss
from tests.support.custom_loops import EXACT, SAMPLES, small_plan, train_in_own_loop
from tests.support.training import (
    IGNORED,
    Rows,
    apart,
    language_model,
    make_workload,
    mean_loss,
    network,
    points,
    reference,
    token_loss,
    tokens,
    weights,
)


def first_batch() -> Batch:
    return next(iter(autobatch.batches(points(), small_plan())))


@pytest.mark.parametrize("overflows", [False, True])
def test_a_loss_scale_changes_nothing_and_an_overflow_skips_the_step(overflows: bool) -> None:
    workload = make_workload(model=lambda: network(torch.float32), train_data=points(dtype=torch.float32))
    expected, _ = reference(workload, [range(SAMPLES)], mean_loss, clip=0.01)
    torch.manual_seed(0)
    model = workload.model()
    before = weights(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126 if overflows else 2.0**10)
    for batch in autobatch.batches(
        workload.train_data, small_plan(), sampler=range(SAMPLES), scaler=scaler, optimizer=optimizer
    ):
        for micro in batch:
            batch.backward(mean_loss(model, micro.data) * (1e6 if overflows else 1.0))
        result = batch.step(max_grad_norm=0.01)
    assert result.applied is not overflows
    assert scaler.get_scale() == (2.0**125 if overflows else 2.0**10)
    if overflows:
        assert torch.equal(weights(model), before)
    else:
        assert apart(weights(model) - before, expected - before) < 1e-5


def test_a_disabled_scaler_lets_no_overflow_through() -> None:
    workload = make_workload()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with pytest.raises(NonFiniteError, match=r"the loss \(nan\) of batch 0 is not finite"):
        train_in_own_loop(
            make_workload(loss=lambda model, batch: mean_loss(model, batch) * math.nan),
            autobatch.batches(workload.train_data, small_plan(), scaler=scaler),
        )


def test_gradients_of_16_bit_parameters_add_up() -> None:
    """1024 times 1/1024 is 1, but 0.25 if bf16 adds up in bf16."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros((), dtype=torch.bfloat16))

    model = One()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = small_plan(1024, 1)
    for batch in autobatch.batches(Rows(torch.ones(1024)), plan, optimizer=[optimizer]):
        for micro in batch:
            batch.backward((model.weight * micro.data[0].bfloat16()).mean())
        batch.step()
    assert model.weight.item() == -1.0
    assert not model.weight._post_accumulate_grad_hooks
    batch = next(iter(autobatch.batches(Rows(torch.ones(1024)), plan)))
    for micro in batch:
        batch.backward((model.weight * micro.data[0].bfloat16()).mean())
    with pytest.raises(InputError, match="parameters in bfloat16"):
        batch.step(optimizer)


def test_several_optimizers_step_together_and_are_clipped_by_one_norm() -> None:
    workload = make_workload()
    expected, _ = reference(workload, [range(SAMPLES)], mean_loss, clip=0.01)
    torch.manual_seed(0)
    model = workload.model()
    pair = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2])]
    for batch in autobatch.batches(workload.train_data, small_plan()):
        for micro in batch:
            batch.backward(mean_loss(model, micro.data))
        result = batch.step(*pair, max_grad_norm=0.01)
    assert result.stepped == (True, True)
    assert apart(weights(model), expected) <= EXACT


def test_earlier_gradients_do_not_count_if_the_optimizer_is_known() -> None:
    workload = make_workload()
    expected, _ = reference(workload, [range(SAMPLES)], mean_loss)
    torch.manual_seed(0)
    model = workload.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mean_loss(model, next(iter(DataLoader(workload.train_data, batch_size=9)))).backward()
    for batch in autobatch.batches(workload.train_data, small_plan(), optimizer=optimizer):
        for micro in batch:
            batch.backward(mean_loss(model, micro.data))
        batch.step()
    assert apart(weights(model), expected) <= EXACT


def test_a_batch_that_counts_nothing_takes_no_step() -> None:
    data = tokens()
    data.columns[1].fill_(IGNORED)
    workload = make_workload(model=language_model, train_data=data, loss=token_loss)
    torch.manual_seed(0)
    before = weights(workload.model())
    found, losses = train_in_own_loop(workload, autobatch.batches(data, small_plan()))
    assert torch.equal(found, before)
    assert math.isnan(losses[0])


def test_a_missing_backward_is_refused() -> None:
    micros = iter(first_batch())
    next(micros)
    with pytest.raises(
        InputError, match=r"not called for micro-batch 1 of batch 0.*in place of loss\.backward"
    ):
        next(micros)


def test_a_step_before_the_end_is_refused() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = first_batch()
    with pytest.raises(InputError, match="after 0 of 24 samples of batch 0"):
        batch.step(optimizer)
    for micro in batch:
        with pytest.raises(InputError, match=r"not called for micro-batch|after \d+ of 24"):
            batch.step(optimizer)
        batch.backward(mean_loss(model, micro.data))
        with pytest.raises(InputError, match="called without a micro-batch in batch 0"):
            batch.backward(mean_loss(model, micro.data))
    with pytest.raises(InputError, match="has no optimizer"):
        batch.step()
    with pytest.raises(InputError, match="found a Sequential"):
        batch.step(model)
    assert batch.step(optimizer).applied
    with pytest.raises(InputError, match="already taken"):
        batch.step(optimizer)


def test_a_batch_without_a_step_does_not_leak_into_the_next() -> None:
    model = network()
    batches = iter(autobatch.batches(points(), small_plan(8), steps=2))
    batch = next(batches)
    for micro in batch:
        batch.backward(mean_loss(model, micro.data))
    with pytest.raises(InputError, match="no step was taken for batch 0"):
        next(batches)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda found: found.expand(3), r"a tensor of shape \(3,\)"),
        (lambda found: found.item(), "found a float"),
        (lambda found: Loss(found.expand(3), 3), "total of a Loss"),
    ],
)
def test_a_value_that_is_not_a_loss_is_refused(loss, message: str) -> None:
    batch, model = first_batch(), network()
    micro = next(iter(batch))
    with pytest.raises(InputError, match=message):
        batch.backward(loss(mean_loss(model, micro.data)))


def test_a_detached_loss_is_refused() -> None:
    workload = make_workload(loss=lambda model, batch: mean_loss(model, batch).detach())
    with pytest.raises(InputError, match="no gradient"):
        train_in_own_loop(workload, autobatch.batches(points(), small_plan()))
