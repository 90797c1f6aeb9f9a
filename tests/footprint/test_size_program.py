"""Programs over micro-batch and size: exact sizes, bounds where there is no polynomial, and refusals."""

from __future__ import annotations

import pytest

from autobatch.device.allocator.trace import FREE, Trace
from autobatch.footprint.program import Untraceable
from autobatch.footprint.size_program import TRACED_STEPS, Shape, fit_size_program
from autobatch.footprint.tracing.trace_mode import Label, Recording

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


def test_sizes_are_exact_at_shapes_that_were_not_traced() -> None:
    program = fit_size_program([(shape, recording(shape)) for shape in SHAPES])
    assert program.is_exact
    for shape in (Shape(1, 4.0), Shape(17, 13.0), Shape(200, 24.0)):
        m, size = shape
        assert program.later.sizes_at(shape) == [8 * m * size, 100 + 8 * m * size + m * size**2]
        assert program.first.sizes_at(shape)[2] == 64
    assert program.setup.blocks == (0,)


def test_a_batch_belongs_to_the_micro_batch_that_follows() -> None:
    program = fit_size_program([(shape, recording(shape)) for shape in SHAPES])
    assert [len(part.blocks) for part in (program.single, program.first, program.second, program.later)] == [
        3, 3, 2, 2
    ]  # fmt: skip
    assert len(program.step.blocks) == 1


def test_sizes_that_a_library_rounds_are_bounded_from_above() -> None:
    def rounded(m: int, size: float) -> float:
        return m * (-(-size // 16) * 16) * 100

    points = [(shape, recording(shape, rounded)) for shape in SHAPES]
    program = fit_size_program(points)
    assert not program.is_exact
    for shape, _ in points:
        assert program.later.sizes_at(shape)[1] >= rounded(*shape)


def test_other_events_at_another_size_are_refused() -> None:
    points = [(shape, recording(shape)) for shape in SHAPES]
    shape, last = points[-1]
    longer = Trace((*last.trace.events, (999, 5)), last.trace.marks)
    points[-1] = (
        shape,
        Recording(
            trace=longer,
            labels=last.labels,
            products=(),
            has_convolutions=False,
            has_selections=False,
        ),
    )
    with pytest.raises(Untraceable, match="order of allocations"):
        fit_size_program(points)


def test_shapes_that_determine_nothing_are_refused() -> None:
    points = [(shape, recording(shape)) for shape in [Shape(2, 4.0)] * 6 + [Shape(3, 5.0)]]
    with pytest.raises(Untraceable, match="determine no polynomial"):
        fit_size_program(points)


def test_phases_of_another_kind_of_step_are_refused() -> None:
    points = []
    for shape in SHAPES:
        one = recording(shape)
        marks = tuple(
            (position, "loss" if phase == "backward" else phase) for position, phase in one.trace.marks
        )
        points.append((shape, Recording(
            trace=Trace(one.trace.events, marks), labels=one.labels, products=(),
            has_convolutions=False, has_selections=False,
        )))  # fmt: skip
    with pytest.raises(Untraceable, match="phases"):
        fit_size_program(points)
