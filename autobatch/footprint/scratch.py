"""Scratch memory of libraries in the traces of a GPU, as distinct from the tensors of the step.

    Traces ──split──► tensors + scratch ──fit──► Envelope ──replay──► bounds

A kernel takes its scratch and frees it before the operator returns. Its size follows the library's own rules:
it appears past some size, grows in tiles, or changes with the chosen plan. A fit of all events would fail at
the first such block. The tensors of the step stay polynomials, so they are fitted without the scratch, and
the scratch is bounded: by its size at the largest run from below, and in proportion to it from above.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, Self

from autobatch.device.allocator.trace import FREE, Trace
from autobatch.footprint.program import Polynomial, Program, Untraceable, interpolate

Events = tuple[tuple[int, int], ...]
Rules = list[tuple[int, Polynomial | None]]
"""Events whose sizes are rules over the micro-batch."""


class Split(NamedTuple):
    """A trace in two parts."""

    tensors: Trace
    """What outlives its operator; canonical, without marks."""
    scratch: dict[int, Events]
    """Scratch by the number of events of `tensors` before it, with blocks numbered from 0."""


def split(trace: Trace) -> Split:
    """Separate the scratch: blocks that are freed before anything that outlives them is taken or freed."""
    kept: list[tuple[int, int]] = []
    scratch: dict[int, list[tuple[int, int]]] = {}
    # The canonical order sorts consecutive frees, so those are handled together.
    for is_free, run in groupby(trace.canonical().events, lambda event: event[1] == FREE):
        if not is_free:
            kept.extend(run)
            continue
        freed = [block for block, _ in run]
        while kept and kept[-1][0] in freed and kept[-1][1] != FREE:
            block, size = kept.pop()
            freed.remove(block)
            inner = scratch.pop(len(kept) + 1, [])
            scratch.setdefault(len(kept), []).extend([(block, size), *inner, (block, FREE)])
        kept.extend((block, FREE) for block in freed)
    tensors = Trace(tuple(kept)).canonical()
    return Split(tensors, {place: _renumbered(part) for place, part in scratch.items()})


@dataclass(frozen=True, slots=True)
class Envelope:
    """Bounds on the memory of a step whose scratch follows no polynomial, made by `fit`."""

    seen: Program
    """The tensors, with the scratch of the largest run at every size."""
    upper: Program
    """The tensors, with scratch that grows in proportion."""
    largest: int
    """The micro-batch of the largest run."""
    is_checked: bool
    """True if a run has checked each polynomial: two runs give a line and a third checks it."""

    @classmethod
    def fit(cls, points: Iterable[tuple[int, Trace]]) -> Self:
        """Fit bounds to traces at different micro-batches.

        Traces at smaller sizes whose tensors have another order than in the largest are left out, because
        some operators take other steps there. If no other trace has the order of the largest, its tensors are
        those of the smaller ones, and what it takes beside them counts as scratch.

        Args:
            points: ``(micro-batch, trace)``.

        Raises:
            Untraceable: no two runs have the same tensors, or the line through two sizes would be negative
                at 0, the mark of a line through a parabola.
        """
        parts = sorted(((m, split(trace)) for m, trace in points), key=lambda point: point[0])
        alike = _alike(parts)
        if len(alike) == 1:
            return cls._fit_beside(_alike(parts[:-1]), *parts[-1])
        seen, upper = _bounds([(m, part.tensors.events) for m, part in alike])
        degree = max((2 if rule.square else 1 for _, rule in seen if rule is not None), default=1)
        if len(alike) == 2:
            _check_lines([(m, part.tensors.events) for m, part in alike])
        return cls(*_with_scratch(seen, upper, alike), parts[-1][0], len(alike) > degree + 1)

    @classmethod
    def _fit_beside(cls, alike: Sequence[tuple[int, Split]], m: int, last: Split) -> Self:
        """Fit bounds to a trace that has the tensors of smaller ones, and other blocks beside them."""
        if len(alike) < 2:
            raise Untraceable(f"no other run has the tensors of that at micro-batch {m}")
        rules, _ = _bounds([(size, part.tensors.events) for size, part in alike])
        found = _found_among(Program(tuple(rules), ()).at(m).events, last.tensors.events)
        seen: Rules = []
        upper: Rules = []
        for (block, size), place in zip(last.tensors.events, found, strict=True):
            known = None if place is None else rules[place][1]
            seen.append((block, None if size == FREE else known or Polynomial(size)))
            upper.append((block, None if size == FREE else known or _proportional(m, size)))
        return cls(*_with_scratch(seen, upper, [(m, last)]), m, True)


def order_of_tensors(trace: Trace) -> int:
    """Return a number that two traces share if their tensors are taken and freed in the same order."""
    return hash(_shape(split(trace).tensors.events))


def in_proportion(m: int, trace: Trace) -> Program:
    """Return a program whose blocks grow in proportion to the micro-batch, from one trace.

    Blocks of the size of one that the setup takes are constant: parameters, gradients, the optimizer's state.
    It serves for steps whose order of allocations depends on the values of the data, as that of packed
    sequences does.

    Args:
        m: the micro-batch of the trace.
        trace: the events of an attempt.
    """
    events = trace.canonical().events
    start = next((index for index, phase in trace.canonical().marks if phase != "setup"), 0)
    constant = {size for _, size in events[:start]}
    rules = {size: Polynomial(size) if size in constant else _proportional(m, size) for _, size in events}
    return Program(tuple((block, None if size == FREE else rules[size]) for block, size in events), ())


def _alike(parts: Sequence[tuple[int, Split]]) -> list[tuple[int, Split]]:
    """Return the parts whose tensors have the order of the last."""
    last = _shape(parts[-1][1].tensors.events) if parts else ()
    return [(m, part) for m, part in parts if _shape(part.tensors.events) == last]


def _found_among(tensors: Events, events: Events) -> list[int | None]:
    """Return the place of each event in ``tensors``, whose events occur in their order; None for others.

    Raises:
        Untraceable: not all of the tensors occur.
    """
    places: list[int | None] = []
    names: dict[int, int] = {}
    at = 0
    freed: set[int] = set()
    for block, size in events:
        if not freed:
            end = at
            while end < len(tensors) and tensors[end][1] == FREE:
                end += 1
            freed = {number for number, _ in tensors[at:end]}
            at = end
        if size == FREE:
            freed.discard(names.get(block, -1))
            places.append(None)
        elif not freed and at < len(tensors) and tensors[at][1] == size:
            names[block] = tensors[at][0]
            places.append(at)
            at += 1
        else:
            places.append(None)
    if freed or at < len(tensors):
        raise Untraceable(f"of {len(tensors)} events at smaller sizes, those from {at} on do not occur")
    return places


def _with_scratch(seen: Rules, upper: Rules, alike: Sequence[tuple[int, Split]]) -> tuple[Program, Program]:
    """Return both bounds with the scratch in its places."""
    lower_scratch: dict[int, Rules] = {}
    upper_scratch: dict[int, Rules] = {}
    for place in {place for _, part in alike for place in part.scratch}:
        found = [(m, part.scratch.get(place, ())) for m, part in alike]
        lower_scratch[place], upper_scratch[place] = _scratch_bounds(found)
    return _merged(seen, lower_scratch), _merged(upper, upper_scratch)


def _scratch_bounds(found: Sequence[tuple[int, Events]]) -> tuple[Rules, Rules]:
    """Return the bounds of the scratch in one place, which may be absent at some sizes."""
    last = found[-1][1]
    if len(found) > 1 and all(_shape(events) == _shape(last) for _, events in found):
        return _bounds(found)
    m, most = max(found, key=lambda point: (_peak_bytes(point[1]), point[0]))
    constant = [(block, None if size == FREE else Polynomial(size)) for block, size in last]
    growing = [(block, None if size == FREE else _proportional(m, size)) for block, size in most]
    return constant, growing


def _bounds(points: Sequence[tuple[int, Events]]) -> tuple[Rules, Rules]:
    """Return a lower and an upper bound of every event, equal where sizes are polynomials."""
    sizes_of = [m for m, _ in points]
    lower: Rules = []
    upper: Rules = []
    known: dict[tuple[int, ...], tuple[Polynomial, Polynomial]] = {}
    for column in zip(*(events for _, events in points), strict=True):
        block, size = column[0]
        if size == FREE:
            lower.append((block, None))
            upper.append((block, None))
            continue
        sizes = tuple(size for _, size in column)
        if sizes not in known:
            known[sizes] = _bound(sizes_of, sizes)
        lower.append((block, known[sizes][0]))
        upper.append((block, known[sizes][1]))
    return lower, upper


def _bound(sizes_of: Sequence[int], sizes: Sequence[int]) -> tuple[Polynomial, Polynomial]:
    try:
        rule = interpolate(sizes_of, sizes)
    except Untraceable:
        rule = None
    if rule is not None and min(rule) >= 0:
        return rule, rule
    return Polynomial(sizes[-1]), _proportional(sizes_of[-1], max(sizes))


def _check_lines(points: Sequence[tuple[int, Events]]) -> None:
    """Raise if a line through two sizes would be negative at 0, the mark of a line through a parabola."""
    (low, small), (high, large) = points
    for (_, size), (_, more) in zip(small, large, strict=True):
        # Sizes in tiles may seem to bend by less.
        if size != FREE and more * low > 1.01 * size * high:
            raise Untraceable(f"{size} bytes at micro-batch {low} and {more} at {high} lie on no line")


def _proportional(m: int, size: int) -> Polynomial:
    return Polynomial(0, size, 0, m)


def _merged(tensors: Rules, scratch: dict[int, Rules]) -> Program:
    """Return the program of the tensors, with the scratch in its places."""
    events: Rules = []
    fresh = 1 + max((block for block, _ in tensors), default=-1)
    for index in range(len(tensors) + 1):
        here = scratch.get(index, [])
        events.extend((fresh + block, rule) for block, rule in here)
        fresh += 1 + max((block for block, _ in here), default=-1)
        events.extend(tensors[index : index + 1])
    return Program(tuple(events), ())


def _renumbered(events: Sequence[tuple[int, int]]) -> Events:
    numbers: dict[int, int] = {}
    return tuple((numbers.setdefault(block, len(numbers)), size) for block, size in events)


def _shape(events: Events) -> tuple[tuple[int, bool], ...]:
    return tuple((block, size == FREE) for block, size in events)


def _peak_bytes(events: Events) -> int:
    live: dict[int, int] = {}
    peak = 0
    for block, size in events:
        if size == FREE:
            live.pop(block)
        else:
            live[block] = size
            peak = max(peak, sum(live.values()))
    return peak
