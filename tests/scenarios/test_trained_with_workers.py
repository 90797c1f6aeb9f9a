"""Runs that loader workers feed: the same weights as without them, whatever happens on the way."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from autobatch.device.allocator.ledger import MemoryStats
from tests.support.faults import Watching
from tests.support.feeds import fed_loop
from tests.support.kinds import stateful
from tests.support.training import INFO_NCE, fingerprint, network


class TwoSamplesFit(Watching):
    """A meter of a GPU that holds two samples."""

    def count(self, tensors) -> None:
        tensors = list(tensors)
        if len(tensors[0]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    def stats(self) -> MemoryStats:
        return MemoryStats(None, None, None, None, None)


def noisy(samples: Any) -> Any:
    """Draw beside the samples, seeded by the first of a micro-batch."""
    inputs, *others = default_collate(samples)
    return inputs + torch.randn(()) + random.random(), *others


@pytest.mark.parametrize("fields", [{"collate": noisy}, {"loss": INFO_NCE}])
def test_workers_that_start_again_whenever_memory_runs_out_feed_what_a_run_without_them_has(
    fields: dict[str, Any],
) -> None:
    workload = stateful(model=lambda: network(torch.float32), **fields)
    with fed_loop(workload, workers=2, micro_batch=7, meter=TwoSamplesFit(None)) as loop:
        records = list(loop.run())
        smaller = fingerprint(loop.train_state.model)
    assert [record.micro_batch for record in records] == [2] * 6
    assert loop.oom_recoveries == 2
    with fed_loop(workload, workers=0, sample_seeds=True, micro_batch=2) as loop:
        list(loop.run())
        assert fingerprint(loop.train_state.model) == smaller
