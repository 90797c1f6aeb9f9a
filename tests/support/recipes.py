"""Random steps, and traces of them at any micro-batch."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from autobatch.core.units import KiB, MiB
from autobatch.device.allocator.trace import FREE, Trace


@st.composite
def recipes(draw, *, square: bool = False):
    """Steps of a random program: ``(slope, constant, square)`` allocates, an int frees a live block."""
    sizes = st.tuples(
        st.integers(0, 300 * KiB), st.integers(0, 3 * MiB), st.integers(0, 500 if square else 0)
    )
    return draw(st.lists(st.one_of(sizes, sizes, st.integers(0, 30)), min_size=1, max_size=30))


def trace_of(recipe, m: int, *, shuffle: random.Random | None = None) -> Trace:
    """Execute a recipe. With ``shuffle``, runs of frees are shuffled and ids are reused."""
    events: list[tuple[int, int]] = []
    live: list[int] = []
    ids = iter(range(1000, 10**6))
    frees: list[tuple[int, int]] = []
    free_ids: list[int] = []

    def flush():
        if shuffle is not None:
            shuffle.shuffle(frees)
        events.extend(frees)
        free_ids.extend(block for block, _ in frees)
        frees.clear()

    for step in recipe:
        if isinstance(step, int):
            if live:
                frees.append((live.pop(step % len(live)), FREE))
            continue
        flush()
        reuse = shuffle is not None and free_ids and shuffle.random() < 0.5
        block = free_ids.pop() if reuse else next(ids)
        live.append(block)
        events.append((block, step[0] * m + step[1] + step[2] * m * m))
    flush()
    return Trace(tuple(events), ((0, "forward"),))


def trace(*sizes: int) -> Trace:
    """Return a trace that takes a block of each size."""
    return Trace(tuple(enumerate(sizes)))
