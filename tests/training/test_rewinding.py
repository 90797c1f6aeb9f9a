"""Buffers that a failed window has changed are put back, or the run ends rather than guess."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autobatch.core.errors import RestartSmallerError
from tests.support.faults import Fault, plain, train
from tests.support.training import fingerprint, make_loop, network


def test_a_large_buffer_is_put_back_once_it_was_seen_to_change() -> None:
    class Queue(nn.Module):
        """Remembers features in a buffer too large to be copied for every window on suspicion."""

        def __init__(self) -> None:
            super().__init__()
            self.body = network()
            self.register_buffer("queue", torch.zeros(2**19, dtype=torch.float64))
            self.register_buffer("mask", torch.ones(2**19, dtype=torch.float64))

        def forward(self, inputs):
            out = self.body(inputs)
            self.queue.roll(len(inputs))
            self.queue[: len(inputs)] += out.detach().sum(1)
            return out * self.mask[0]

    smaller = fingerprint(train(plain(model=Queue), None, shrink_to=2)[0].train_state.model)
    loop, _ = train(plain(model=Queue), Fault(40))
    assert fingerprint(loop.train_state.model) == smaller
    assert len(loop.train_state.buffers._changing) == 1
    first = make_loop(plain(model=Queue), target_batch=8, micro_batch=4, steps=1)
    with Fault(40) as fault:
        fault.armed = True
        with pytest.raises(RestartSmallerError, match="a large buffer"):
            next(first.run())


def test_a_buffer_that_the_forward_pass_replaces_is_put_back() -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = network()
            self.register_buffer("mean", torch.zeros(3, dtype=torch.float64), persistent=False)

        def forward(self, inputs):
            out = self.body(inputs)
            self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(0)
            return out

    smaller = fingerprint(train(plain(model=Average), None, shrink_to=2)[0].train_state.model)
    loop, _ = train(plain(model=Average), Fault(40))
    assert fingerprint(loop.train_state.model) == smaller
