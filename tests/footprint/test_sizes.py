"""Programs over micro-batch and size, and replays of real batches against training."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autobatch.device.allocator.caching import CachingAllocator
from autobatch.device.allocator.trace import FREE, Trace
from autobatch.footprint.program import Untraceable
from autobatch.footprint.sizes import TRACED_STEPS, Shape, fit_size_program, replay_batches
from autobatch.footprint.tracing.trace_mode import Label, Recording
from autobatch.rehearsal.trace import setting_of
from autobatch.search.curve import trace_sizes
from autobatch.workload.split import Split
from tests.support.ragged import Sequences, ragged_split, ragged_workload, simulated_setup, wide_model
from tests.support.training import make_loop

STEPS = 5
SHAPES = [Shape(m, size) for size in (4.0, 10.0, 24.0) for m in (2, 3)] + [Shape(5, 7.0)]


def recording(shape: Shape, rule=lambda m, size: 100 + 8 * m * size + m * size**2) -> Recording:
    """Record steps in which a micro-batch takes its batch, its activations and, once, its gradients."""
    events, marks, labels = [(0, 64)], [(0, "setup")], [Label("parameters", "")]
    fresh = 1

    def take(size: float, kind: str) -> int:
        nonlocal fresh
        events.append((fresh, int(size)))
        labels.append(Label(kind, ""))
        fresh += 1
        return fresh - 1

    for count in TRACED_STEPS:
        gradients = None
        for _ in range(count):
            batch = take(8 * shape.micro_batch * shape.size, "batch")
            marks.append((len(events), "forward"))
            activations = take(rule(shape.micro_batch, shape.size), "activations")
            marks.append((len(events), "backward"))
            gradients = take(64, "gradients") if gradients is None else gradients
            events.extend([(batch, FREE), (activations, FREE)])
        marks.append((len(events), "optimizer"))
        take(32, "temporaries")
        events.append((gradients, FREE))
    return Recording(
        trace=Trace(tuple(events), tuple(marks)),
        labels=tuple(labels),
        products=(),
        has_convolutions=False,
        has_selections=False,
    )


def test_sizes_that_a_library_rounds_are_bounded_from_above() -> None:
    def rounded(m: int, size: float) -> float:
        return m * (-(-size // 16) * 16) * 100

    points = [(shape, recording(shape, rounded)) for shape in SHAPES]
    program = fit_size_program(points)
    assert not program.is_exact
    assert program.first.sizes_at(Shape(17, 13.0))[2] == 64
    for shape, _ in points:
        assert program.later.sizes_at(shape)[1] >= rounded(*shape)


def with_trace(one: Recording, **changes: object) -> Recording:
    return replace(one, trace=replace(one.trace, **changes))


@pytest.mark.parametrize("reason", ["order of allocations", "determine no polynomial", "phases"])
def test_recordings_without_a_program_are_refused(reason: str) -> None:
    shapes = [Shape(2, 4.0)] * 6 + [Shape(3, 5.0)] if "polynomial" in reason else SHAPES
    points = [(shape, recording(shape)) for shape in shapes]
    shape, last = points[-1]
    if reason == "order of allocations":
        points[-1] = shape, with_trace(last, events=(*last.trace.events, (999, 5)))
    elif reason == "phases":
        marks = tuple((at, phase.replace("backward", "loss")) for at, phase in last.trace.marks)
        points = [(shape, with_trace(one, marks=marks)) for shape, one in points]
    with pytest.raises(Untraceable, match=reason):
        fit_size_program(points)


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
    assert replay_batches(program, batches, CachingAllocator(), most_events=1) == 1
