"""The loop between two steps: its records, its learning rates, and what follows a step."""

from __future__ import annotations

import math
from itertools import count
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from autobatch import InputError
from tests.support.kinds import Followed
from tests.support.training import IGNORED, TOKENS, apart, make_loop, make_workload, sgd, then, weights


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


def test_a_record_has_the_items_the_norm_and_the_rates_of_its_batch() -> None:
    """The step of SGD is the learning rate × the gradient. It takes half a second of the clock."""
    loop = make_loop(make_workload(**TOKENS), micro_batch=5, target_batch=16, steps=None, epochs=1)
    loop.clock = count(step=0.5).__next__
    *_, batch = loop.sampler.batches()
    run = loop.run()
    next(run)
    before = weights(loop.train_state.model)
    record = next(run)
    moved = float((weights(loop.train_state.model) - before).norm())
    assert record.grad_norm == pytest.approx(moved / record.learning_rate, rel=1e-9)
    assert record.count == int((TOKENS["train_data"].columns[1][batch.ids] != IGNORED).sum())
    assert (record.seconds, record.items_per_s, record.samples_per_s) == (0.5, 2 * record.count, 16)
    assert record.samples == 24, "the last batch is short"


def test_what_follows_a_step_is_that_of_whole_batches() -> None:
    workload = make_workload(model=Followed, optimizer=then(sgd, Followed.follow))
    loop = make_loop(workload, target_batch=16, micro_batch=5, steps=6, ema=0.9)
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
        average = 0.9 * average + 0.1 * weights(model)
    assert apart(weights(loop.train_state.model), weights(model)) < 1e-12
    with loop.train_state.averaged():
        trained = [p for p in loop.train_state.model.parameters() if p.requires_grad]
        found = torch.cat([p.detach().flatten() for p in trained])
    places = torch.cat([torch.full((p.numel(),), p.requires_grad) for p in model.parameters()])
    assert apart(found, average[places]) < 1e-12
