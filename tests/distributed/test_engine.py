"""The engine of one process: it hands everything back."""

from __future__ import annotations

import torch

from autobatch.core.signals import StopRequest
from autobatch.distributed.engine import OneProcess, OutOfMemory
from autobatch.step.loss_share import StepTotals
from tests.support.training import make_loop, make_workload


def test_one_process_asks_nobody() -> None:
    engine, request, totals = OneProcess(), StopRequest(), StepTotals(samples=3)
    train_state = make_loop(make_workload()).train_state
    oom = OutOfMemory("full", size=2, smaller=1)
    assert engine.combine(train_state, totals) is totals
    assert engine.combine(train_state, oom) is oom
    assert engine.settle(oom, may_repeat=True) is oom
    assert engine.shared_request(request) is request
    assert engine.limits == []
    assert engine.ranks.world == 1
    before = torch.get_rng_state()
    engine.share(train_state.model.parameters())
    engine.agree_on_request()
    assert torch.equal(torch.get_rng_state(), before)
    assert not train_state.stepping
