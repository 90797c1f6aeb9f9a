"""Runs that loader workers feed: the same weights as without them, whatever happens on the way."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from torch.utils.data import default_collate

from autobatch.device.allocator.ledger import MemoryStats
from tests.support.faults import Watching
from tests.support.feeds import fed_loop
from tests.support.kinds import run_of, stateful
from tests.support.training import fingerprint, network


@pytest.mark.parametrize("kind", ["augmented, averaged", "whole batch"])
def test_a_run_trains_the_same_with_and_without_workers(kind: str) -> None:
    """A collate function that draws is seeded by the first sample of its micro-batch."""

    def noisy(samples):
        inputs, *others = default_collate(samples)
        return inputs + torch.randn(()) + random.random(), *others

    workload, options = run_of(kind)
    if kind.startswith("augmented"):
        workload = dataclasses.replace(workload, collate=noisy)
    prints = set()
    for workers in (0, 2):
        with fed_loop(workload, workers=workers, sample_seeds=True, **options) as loop:
            records = list(loop.run())
            assert [record.micro_batch for record in records] == [3] * 6
            prints.add(fingerprint(loop.train_state.model))
    assert len(prints) == 1


class TwoSamplesFit(Watching):
    """A meter of a GPU that holds two samples."""

    def count(self, tensors) -> None:
        tensors = list(tensors)
        if len(tensors[0]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    def stats(self) -> MemoryStats:
        return MemoryStats(None, None, None, None, None)


def test_the_stream_of_workers_starts_again_whenever_memory_runs_out() -> None:
    workload = stateful(model=lambda: network(torch.float32))
    with fed_loop(workload, workers=2, micro_batch=7, meter=TwoSamplesFit(None)) as loop:
        records = list(loop.run())
        smaller = fingerprint(loop.train_state.model)
    assert [record.micro_batch for record in records] == [2] * 6
    assert loop.oom_recoveries == 2
    with fed_loop(workload, workers=0, sample_seeds=True, micro_batch=2) as loop:
        list(loop.run())
        assert fingerprint(loop.train_state.model) == smaller
