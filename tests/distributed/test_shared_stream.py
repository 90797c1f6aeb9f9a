"""Streams over ranks: what rank 0 sends; `tests/scenarios/test_ranks.py` trains on one."""

from __future__ import annotations

import fractions

import numpy as np
import pytest
import torch

from autobatch.distributed.shared_stream import open_sampler, split_note
from autobatch.workload.streams import StreamSampler
from tests.support.options import as_options
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group
from tests.support.training import make_workload


def send_samples() -> tuple[bool, int]:
    """Send samples of every kind that are parts of larger memory; return whether they arrive, and bytes."""
    group = open_group()
    samples = [
        [torch.arange(20.0).reshape(4, 5).T[1:], torch.tensor(2.5, dtype=torch.bfloat16), torch.zeros(0, 3)],
        {"text": "a", "more": (np.float32(0.5), fractions.Fraction(1, 3), None)},
        torch.zeros(1000, 1000)[3],
    ]
    options = as_options("fit", target_batch=3, steps=1)
    sampler = open_sampler(make_workload(), lambda: iter(samples), group, options)
    assert isinstance(sampler, StreamSampler)
    next(sampler.batches())
    tensors, plain, row = sampler.held.values()
    note = split_note(group.rank, group)
    assert split_note(samples[0], group) is None
    group.close()
    is_same = all(map(torch.equal, tensors, samples[0])) and plain == samples[1]  # type: ignore[arg-type]
    return is_same and "it must not be split by rank" in str(note), row.untyped_storage().nbytes()


@pytest.mark.distributed
def test_samples_arrive_without_the_memory_around_them_and_ranks_that_read_others_are_told(
    server: RankServer,
) -> None:
    assert server.values(send_samples) == [(True, 4000)] * 2
