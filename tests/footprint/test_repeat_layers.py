"""Events that repeat from layer to layer."""

from __future__ import annotations

import pytest

from autobatch.footprint import repeat_layers
from autobatch.footprint.layer_events import Event, Run
from autobatch.footprint.program import Polynomial, Untraceable


def test_runs_of_events_are_found_where_layers_add_them():
    few = [[*"abab"], [*"xaabbz"]]
    more = [[*"ababab"], [*"xaaabbbz"]]
    for one, other in zip(few, more, strict=True):
        sites = repeat_layers._inserted([(c,) for c in one], [(c,) for c in other])
        built, done = [], 0
        for site in sites:
            built += one[done : site.at]
            start = len(built)
            built += other[start : start + site.length]
            done = site.at
        assert built + one[done:] == other
    assert repeat_layers._parts([*"ab"], [*"aabb"]) == [1, 1]
    assert repeat_layers._parts([*"ab"], [*"abab"]) == [2]
    with pytest.raises(Untraceable):
        repeat_layers._parts([*"ab"], [*"abba"])


def layered(depth: int, uneven: int = 0) -> list[Event]:
    """Return the events of a step: each layer takes a block, and the backward pass frees them in reverse."""
    takes = [Event("take", "layer #", 8, (block, block)) for block in range(depth)]
    frees = [Event("free", "layer #", 8, (block, block)) for block in reversed(range(depth))]
    head = Event("take", "head", 100 + uneven * depth**2, (depth,))
    return [*takes, Event("mark", "backward", 0, ()), head, *frees]


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
    deeper = repeat_layers.deepen((layered(3), layered(4), layered(5)), added)
    assert unrolled(deeper) == layered(4 + added)


def test_sizes_that_do_not_grow_evenly_are_refused():
    with pytest.raises(Untraceable, match="an allocation has 109, 116 and 125 bytes"):
        repeat_layers.deepen((layered(3, 1), layered(4, 1), layered(5, 1)), 2)


def normed(depth: int) -> list[Event]:
    """Return the events of a step that also takes a block as large as that of a layer at a depth of 4."""
    norms = Event("take", "temporaries", 2 * depth, (depth + 1,), rule=Polynomial(2 * depth))
    blocks = [event._replace(text="temporaries") for event in layered(depth)]
    return [*blocks[: depth + 2], norms, *blocks[depth + 2 :]]


def test_a_size_that_grows_with_the_depth_may_be_that_of_a_layer_at_one_depth():
    deeper = unrolled(repeat_layers.deepen((normed(3), normed(4), normed(5)), 3))
    assert [(event.kind, event.numbers) for event in deeper] == [(e.kind, e.numbers) for e in normed(7)]
    assert next(event.rule for event in deeper if event.rule) == Polynomial(14)
