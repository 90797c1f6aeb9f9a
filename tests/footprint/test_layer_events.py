"""Events of a deep model that repeat from layer to layer, by hand."""

from __future__ import annotations

import pytest

from autobatch.footprint.depth import Event, Run, deepen, events_of, footprint_of
from autobatch.footprint.fit import footprint
from autobatch.footprint.program import Polynomial, Untraceable
from autobatch.footprint.tracing.trace_mode import Product
from tests.support.step_workloads import WORKLOADS, setting, setup


def layered(depth: int, uneven: int = 0) -> list[Event]:
    """Return the events of a step: each layer takes a block, and the backward pass frees them in reverse."""
    takes = [Event(("take", "activations", "layer.#"), 8, (block, block)) for block in range(depth)]
    frees = [
        Event(("free", "activations", "layer.#", 1), 8, (block, block)) for block in reversed(range(depth))
    ]
    head = Event(("take", "activations", "head"), 100 + uneven * depth**2, (depth,))
    return [*takes, Event(("mark", "backward")), head, *frees]


def unrolled(runs: list[Run]) -> list[Event]:
    found = []
    for run in runs:
        for time in range(run.times):
            for event, steps in zip(run.events, run.steps, strict=True):
                numbers = zip(event.numbers, steps, strict=True)
                found.append(event._replace(numbers=tuple(start + time * step for start, step in numbers)))
    return found


@pytest.mark.parametrize("added", [0, 1, 7])
def test_further_layers_have_the_events_of_a_deeper_step(added):
    deeper = deepen((layered(3), layered(4), layered(5)), added)
    assert unrolled(deeper) == layered(4 + added)


def test_sizes_that_do_not_grow_evenly_are_refused():
    with pytest.raises(Untraceable, match="an allocation has 109, 116 and 125 bytes"):
        deepen((layered(3, 1), layered(4, 1), layered(5, 1)), 2)


def normed(depth: int) -> list[Event]:
    """Return the events of a step that also takes a block as large as that of a layer at a depth of 4."""
    norms = Event(("take", "temporaries", ""), 2 * depth, (depth + 1,), rule=Polynomial(2 * depth))
    blocks = layered(depth)
    return [*blocks[: depth + 2], norms, *blocks[depth + 2 :]]


def test_a_size_that_grows_with_the_depth_may_be_that_of_a_layer_at_one_depth():
    deeper = unrolled(deepen((normed(3), normed(4), normed(5)), 3))
    assert [(event.key, event.numbers) for event in deeper] == [(e.key, e.numbers) for e in normed(7)]
    assert next(event.rule for event in deeper if event.rule) == Polynomial(14)


@pytest.mark.parametrize(
    ("traces", "expected"),
    [
        (("abab", "ababab", "abababab"), "ababababab"),
        (("xaabbz", "xaaabbbz", "xaaaabbbbz"), "xaaaaabbbbbz"),
        (("ab", "abcb", "abcbcb"), "abcbcbcb"),
        (("ab", "ba", "ab"), None),
        (("ab", "aabb", "aabbab"), None),
    ],
)
def test_further_layers_are_added_where_they_are_in_deeper_traces(traces, expected):
    events = [[Event(("mark" if c == "m" else "take", c)) for c in trace] for trace in traces]
    if expected is None:
        with pytest.raises(Untraceable):
            deepen(tuple(events), 2)
    else:
        assert "".join(event.key[1] for event in unrolled(deepen(tuple(events), 2))) == expected


@pytest.fixture(scope="module")
def step():
    return footprint(setting(setup(WORKLOADS["perceptron"]()), capability=(8, 0)))


def once(events: list[Event]) -> list[Run]:
    return [Run(events, [(0,) * len(event.numbers) for event in events], 1)]


def test_a_footprint_is_that_of_its_events(step):
    assert footprint_of(step, once(events_of(step))) == (step, tuple(range(len(step.program.events))))


def test_blocks_that_are_freed_twice_or_out_of_order_are_refused(step):
    found = events_of(step)
    freed = next(event for event in found if event.key[0] == "free")
    for events in ([*found, freed], [freed, *found], [event for event in found if event.numbers[:1] != (0,)]):
        with pytest.raises(Untraceable, match="of a deeper model"):
            footprint_of(step, once(events))


def test_a_run_repeats_its_events_with_growing_numbers(step):
    rule = Polynomial(8)
    take = Event(("take", "activations", "layer.#.body"), 8, (0, 3), 5, rule)
    between = Event(("product", True, False))
    free = Event(("free", "activations", "layer.#.body", 0), 8, (0, 3), 6)
    found, origins = footprint_of(step, [Run([take, between, free], [(1, 2), (), (1, 2)], 3)])
    assert found.program.events == ((0, rule), (0, None), (1, rule), (1, None), (2, rule), (2, None))
    assert [label.module for label in found.labels] == ["layer.3.body", "layer.5.body", "layer.7.body"]
    assert found.products == tuple(Product(at, is_backward=True, is_fused=False) for at in (1, 3, 5))
    assert origins == (5, 6) * 3
