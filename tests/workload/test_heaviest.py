"""The heaviest batches of a run, against sums over every micro-batch."""

from __future__ import annotations

import numpy as np
import pytest

from autobatch.workload import heaviest
from autobatch.workload.heaviest import heaviest_batches
from autobatch.workload.order import GlobalBatchSampler
from autobatch.workload.split import Split

SIZES = np.random.default_rng(0).lognormal(2, 1, 53)


@pytest.mark.parametrize("last_batch", ["carry", "flush", "drop"])
@pytest.mark.parametrize("block", [1, 100, 10**6])
def test_the_heaviest_batches_are_those_of_brute_force(last_batch, block: int, monkeypatch) -> None:
    monkeypatch.setattr(heaviest, "BLOCK_SAMPLES", block)
    sampler = GlobalBatchSampler(samples=53, target_batch=10, seed=3, epochs=4, last_batch=last_batch)
    found = heaviest_batches(sampler, SIZES, [1, 3, 4, 10], kept=5)
    for limit, numbers in found.items():
        totals = [
            max(SIZES[part.ids].sum() for part in Split().parts(batch, limit)) for batch in sampler.batches()
        ]
        assert np.allclose([totals[number] for number in numbers], sorted(totals, reverse=True)[:5])
