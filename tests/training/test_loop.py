"""The loop against whole batches: weights, records, schedules and warm-up."""

from __future__ import annotations

import math
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from autobatch import InputError
from tests.support.kinds import Followed
from tests.support.steps import KINDS
from tests.support.training import (
    TOKENS,
    apart,
    make_loop,
    make_workload,
    reference,
    token_loss,
    weights,
    whole_tokens,
)


@pytest.mark.parametrize("micro_batch", [1, 3])
@pytest.mark.parametrize("kind", ["mean", "tokens", "InfoNCE"])
def test_a_run_equals_training_on_whole_batches(kind: str, micro_batch: int) -> None:
    """24 samples in batches of 7 over 3 epochs, with momentum and weight decay; the last one may be short."""
    fields, whole_loss = KINDS[kind]

    def optimizer(params, lr):
        return torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=0.01)

    workload = make_workload(optimizer=optimizer, **fields)
    loop = make_loop(workload, target_batch=7, micro_batch=micro_batch, steps=None, epochs=3)
    records = list(loop.run())
    batches = [batch.ids for batch in loop.sampler.batches()]
    expected, losses = reference(workload, batches, whole_loss)
    assert apart(weights(loop.train_state.model), expected) <= 1e-12
    assert [record.loss for record in records] == pytest.approx(losses, rel=1e-12)
    assert len(records) == loop.sampler.total == 11
    assert records[-1].samples == sum(map(len, batches))


@pytest.mark.parametrize("rate", [math.nan, torch.tensor(-0.1)])
def test_an_invalid_learning_rate_is_named_before_its_step(rate: Any) -> None:
    loop = make_loop(make_workload(), target_batch=6, steps=4)
    run = loop.run()
    next(run), next(run)
    before = weights(loop.train_state.model)
    loop.train_state.optimizers[0].param_groups[-1]["lr"] = rate
    with pytest.raises(InputError, match="learning rates of step 3"):
        next(run)
    assert torch.equal(weights(loop.train_state.model), before)


def test_a_record_has_the_norm_the_items_and_the_rates_of_its_batch() -> None:
    """Against one pass over the whole batch; the step takes half a second of the clock."""
    workload = make_workload(**TOKENS)
    loop = make_loop(workload, micro_batch=5, target_batch=7, steps=1)
    loop.clock = count(step=0.5).__next__
    (batch,) = loop.sampler.batches()
    model = make_loop(workload).train_state.model
    samples = torch.utils.data.default_collate([workload.train_data[index] for index in batch.ids])
    whole_tokens(model, samples).backward()
    (record,) = loop.run()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert record.grad_norm == pytest.approx(float(norm), rel=1e-12)
    assert record.count == float(token_loss(model, samples).count)
    assert (record.seconds, record.items_per_s, record.samples_per_s) == (0.5, 2 * record.count, 14)


def test_what_follows_a_step_is_that_of_whole_batches() -> None:
    workload = make_workload(model=Followed, after_step=Followed.follow)
    loop = make_loop(workload, target_batch=16, micro_batch=5, steps=6, ema=0.5)
    list(loop.run())
    torch.manual_seed(0)
    model = Followed()
    optimizer = torch.optim.SGD([*model.student.parameters(), model.scale], lr=0.1)
    average = weights(model)
    for batch in loop.sampler.batches():
        inputs, labels = (column[batch.ids] for column in workload.train_data.columns)
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        with torch.no_grad():
            model.follow()
        average = 0.5 * average + 0.5 * weights(model)
    assert apart(weights(loop.train_state.model), weights(model)) < 1e-12
    with loop.train_state.averaged():
        trained = [p for p in loop.train_state.model.parameters() if p.requires_grad]
        found = torch.cat([p.detach().flatten() for p in trained])
    places = torch.cat([torch.full((p.numel(),), p.requires_grad) for p in model.parameters()])
    assert apart(found, average[places]) < 1e-12


def test_a_parameter_that_is_replaced_after_a_step_is_refused_by_name() -> None:
    def after_step(model: nn.Module) -> None:
        model[0].weight = nn.Parameter(model[0].weight.clamp(-1, 1))

    with pytest.raises(InputError, match=r"after_step \(.*test_loop.py:\d+\) .* '0.weight'.*in place"):
        list(make_loop(make_workload(after_step=after_step)).run())
