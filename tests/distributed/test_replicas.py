"""Ranks with whole models: their gradients live in buckets, and a step peaks as it does on one GPU."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.device.allocator.trace import replay
from autobatch.distributed import replicas
from autobatch.distributed.replicas import Buckets, has_buckets, in_buckets
from autobatch.footprint.tracing.trace_step import record
from autobatch.step.train_step import train_step
from autobatch.workload.data import WorstCaseSampler
from tests.support.sharded import state_of
from tests.support.step_workloads import WORKLOADS, setting, setup

WIDE = 2_700


def test_buckets_are_for_gradients_above_25_mib_in_32_bits():
    assert has_buckets(nn.Linear(WIDE, WIDE, device="meta"))
    assert not has_buckets(nn.Linear(WIDE, WIDE, device="meta", dtype=torch.bfloat16))
    assert not has_buckets(nn.Linear(8, 8))


def steps_of(arrange):
    asked = setting(setup(WORKLOADS["transformer"]()), steps=(1, 2, 2))
    recording = record(replace(asked, arrange=arrange), 3)
    return recording, replay(recording.trace, CountingAllocator())


def test_gradients_are_held_from_the_start_and_raise_no_peak():
    """Measured with DDP on real ranks: the peak of one process, and gradients that stay after the step."""
    alone, outcome = steps_of(None)
    ranked, other = steps_of(in_buckets)
    parameters = sum(p.numel() * 4 for p in WORKLOADS["transformer"]().model().parameters())
    # A scalar that autograd makes is kept a little longer without buckets.
    assert abs(other.peak_allocated_bytes - outcome.peak_allocated_bytes) <= 4
    kinds = [label.kind for label in ranked.labels]
    taken = dict(event for event in ranked.trace.events if event[1] > 0)
    assert sum(size for block, size in taken.items() if kinds[block] == "gradients") == parameters
    assert len(alone.labels) != len(ranked.labels)


def test_weights_move_as_without_buckets(monkeypatch):
    monkeypatch.setattr(replicas, "EXCHANGE_BYTES", 500)  # several buckets
    workload = WORKLOADS["perceptron"]()
    results = []
    for buckets in (None, Buckets()):
        torch.manual_seed(0)
        model = workload.model().eval()
        train_state = state_of(workload, model)
        if buckets is not None:
            buckets.attach(train_state)
            assert len({view.untyped_storage()._cdata for view in buckets._views.values()}) > 1
        for _ in range(2):
            batches = [(WorstCaseSampler(workload).batch(4), 4) for _ in range(2)]
            train_step(train_state, batches if buckets is None else buckets.passing(batches, 2), 8)
        results.append([p.detach().clone() for p in model.parameters()])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=1e-7)
