"""Replays of batches of mixed shapes, against the memory of the same batches when they really run."""

from __future__ import annotations

import random
from typing import Any

import pytest

from autobatch.device.allocator.caching import CachingAllocator
from autobatch.footprint.size_program import Shape
from autobatch.footprint.size_replay import replay_batches
from autobatch.search.curve import trace_sizes
from autobatch.setup.trace import setting_of
from autobatch.workload.split import Split
from tests.support.ragged import Sequences, ragged_split, ragged_workload, simulated_setup, wide_model
from tests.support.training import make_loop

STEPS = 5


@pytest.fixture(scope="module", name="traced")
def traced_once(tmp_path_factory) -> tuple:
    workload = ragged_workload(model=wide_model, train_data=Sequences(samples=96, longest=40))
    setup = simulated_setup(workload, tmp_path_factory.mktemp("home"), "2GiB")
    sizes = setup.worst_case.sizes()
    return workload, setup, sizes, trace_sizes(setting_of(setup), sizes)


def real_peaks(workload, setup, split, micro_batch: int, target: int) -> list[tuple[int, int]]:
    """Train, and return the peaks after each step."""
    with setup.device.training() as meter:
        meter.mark("setup")
        loop = make_loop(
            workload, target_batch=target, micro_batch=micro_batch, steps=STEPS, split=split,
            device=setup.device, meter=meter,
        )  # fmt: skip
        model = loop.train_state.model
        meter.count(tensor.data for tensor in [*model.parameters(), *model.buffers()])
        return [(one.peak_allocated_bytes, one.peak_reserved_bytes) for one in loop.run()]


@pytest.mark.parametrize(("by_size", "target", "micro_batch"), [
    (False, 64, 64), (False, 64, 30), (False, 48, 12), (False, 90, 7), (True, 64, 30), (True, 90, 9),
])  # fmt: skip
def test_peaks_are_those_of_training(traced, by_size: bool, target: int, micro_batch: int) -> None:
    workload, setup, sizes, program = traced
    split = ragged_split(workload, micro_batch) if by_size else Split()
    largest = split.largest if by_size else micro_batch
    real = real_peaks(workload, setup, split, largest, target)
    loop = make_loop(workload, target_batch=target, steps=STEPS)
    batches = [
        [Shape(len(part.ids), float(sizes[part.ids].max())) for part in split.parts(batch, largest)]
        for batch in loop.sampler.batches()
    ]
    found = []
    for count in range(1, STEPS + 1):
        allocator = CachingAllocator()
        assert replay_batches(program, batches[:count], allocator, most_events=10**9) == count
        found.append((allocator.peak_allocated_bytes, allocator.peak_reserved_bytes))
    # Scalars that a real step keeps a little longer take one granule each.
    assert [reserved for _, reserved in found] == [reserved for _, reserved in real]
    for (allocated, _), (expected, _) in zip(found, real, strict=True):
        assert abs(allocated - expected) <= 4 * 1024


def test_a_budget_below_the_peak_is_refused(traced) -> None:
    _, _, sizes, program = traced
    draw = random.Random(1)
    batches = [[Shape(draw.randint(2, 20), float(draw.choice(sizes))) for _ in range(4)] for _ in range(10)]
    free = CachingAllocator()
    replay_batches(program, batches, free, most_events=10**9)
    for limit, expected in ((free.peak_reserved_bytes, 10), (free.peak_allocated_bytes - 1, None)):
        assert replay_batches(program, batches, CachingAllocator(limit), most_events=10**9) == expected


def test_a_replay_ends_between_two_batches_after_enough_events(traced) -> None:
    program: Any = traced[3]
    batches = [[Shape(4, 8.0)] * 3] * 50
    assert replay_batches(program, batches, CachingAllocator(), most_events=1) == 1
    assert replay_batches(program, batches, CachingAllocator(), most_events=10**9) == 50
