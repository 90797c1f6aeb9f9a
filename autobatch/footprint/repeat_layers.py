"""The events of a step with more layers, from its events at three depths.

One more layer adds the same events in the same places. The places are where the deeper of two traces has
events that the other one lacks. The numbers of an event grow by the same amount from layer to layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from autobatch.footprint.layer_events import Event, Run
from autobatch.footprint.program import Untraceable


@dataclass(frozen=True)
class _Site:
    """A place of the shallowest trace where each further layer adds events."""

    at: int
    """Number of events before it."""
    length: int


def deepen(traces: tuple[list[Event], list[Event], list[Event]], layers: int) -> list[Run]:
    """Return the events of a step that has this many more layers than the second of three traces.

    Args:
        traces: at successive depths; the rules of the second are used.
        layers: layers to add to it.

    Raises:
        Untraceable: a layer does not add the same events each time.
    """
    few, middle, many = traces
    found: list[Run] = []
    at = [0, 0, 0]
    for site in [*_checked(_names_of(traces)), _Site(len(few), 0)]:
        count = site.at - at[0]
        if count:
            parts = (trace[start : start + count] for trace, start in zip(traces, at, strict=True))
            found.append(Run.once([_grown(a, b, c, layers) for a, b, c in zip(*parts, strict=True)]))
            at = [start + count for start in at]
        if site.length:
            chunk = middle[at[1] : at[1] + site.length]
            first = many[at[2] : at[2] + site.length]
            second = many[at[2] + site.length : at[2] + 2 * site.length]
            found.append(_repeated(chunk, first, second, layers))
            at = [at[0], at[1] + site.length, at[2] + 2 * site.length]
    return found


def _grown(few: Event, middle: Event, many: Event, layers: int) -> Event:
    """Return an event that occurs once, in a deeper model."""
    numbers = []
    for a, b, c in zip(few.numbers, middle.numbers, many.numbers, strict=True):
        if c - b != b - a:
            raise Untraceable(f"a number of an event is {a}, {b} and {c} at the three depths")
        numbers.append(b + layers * (b - a))
    growth = middle.size - few.size
    if many.size - middle.size != growth:
        raise Untraceable(f"an allocation has {few.size}, {middle.size} and {many.size} bytes")
    rule = None if middle.rule is None else middle.rule.plus(layers * growth)
    return middle._replace(numbers=tuple(numbers), rule=rule)


def _repeated(chunk: list[Event], first: list[Event], second: list[Event], layers: int) -> Run:
    """Return the events of a layer, in a deeper model.

    Args:
        chunk: its events in the middle trace.
        first: the same in the deepest trace.
        second: those of the next layer there.
        layers: layers that the deeper model has more than the middle trace.
    """
    events, steps = [], []
    for one, other, later in zip(chunk, first, second, strict=True):
        if not one.size == other.size == later.size:
            raise Untraceable(f"an allocation of a layer has {one.size}, {other.size} and {later.size} bytes")
        starts = (a + layers * (b - a) for a, b in zip(one.numbers, other.numbers, strict=True))
        events.append(one._replace(numbers=tuple(starts)))
        steps.append(tuple(c - b for b, c in zip(other.numbers, later.numbers, strict=True)))
    return Run(events, steps, layers + 1)


def _names_of(traces: Sequence[list[Event]]) -> list[list[tuple[object, ...]]]:
    """Return the events of traces without their numbers, and without sizes that differ with the depth."""
    few, middle, many = (Counter(event.size for event in events) for events in traces)
    # A size that grows with the depth, for example that of the norms of all parameters, may be that of a
    # layer's block at one depth. The number of blocks of that size then grows unevenly.
    common = {size for size in few if many[size] - middle[size] == middle[size] - few[size] >= 0}
    return [
        [(event.kind, event.text, event.size if event.size in common else None) for event in events]
        for events in traces
    ]


def _checked(names: list[list[tuple[object, ...]]]) -> list[_Site]:
    """Return the places where each further layer adds events.

    Raises:
        Untraceable: the deepest trace has not twice what the middle one adds to the shallowest.
    """
    few, middle, many = names
    built: list[tuple[object, ...]] = []
    found: list[_Site] = []
    done = shift = 0
    for site in _sites(few, middle):
        start = site.at + shift
        chunk, twice = (
            middle[start : start + site.length],
            many[start + shift : start + shift + 2 * site.length],
        )
        found += [_Site(site.at, length) for length in _parts(chunk, twice)]
        built += few[done : site.at] + twice
        done, shift = site.at, shift + site.length
    if built + few[done:] != many:
        raise Untraceable("a further layer does not add the same events in the same places")
    return found


def _parts(chunk: list[tuple[object, ...]], twice: list[tuple[object, ...]]) -> list[int]:
    """Return the lengths of the parts of a chunk that each occur twice in a row: ``ab`` is two in ``aabb``.

    Raises:
        Untraceable: it has no such parts.
    """
    if not chunk:
        return []
    for length in range(len(chunk), 0, -1):
        part = chunk[:length]
        if twice[: 2 * length] == part + part:
            with suppress(Untraceable):
                return [length, *_parts(chunk[length:], twice[2 * length :])]
    raise Untraceable("two further layers do not add twice what one adds")


def _sites(few: list[tuple[object, ...]], more: list[tuple[object, ...]]) -> list[_Site]:
    """Return where ``more`` has events that ``few`` lacks, phase by phase."""
    found: list[_Site] = []
    start = 0
    for part, longer in zip(_phases(few), _phases(more), strict=True):
        found += [_Site(start + site.at, site.length) for site in _inserted(part, longer)]
        start += len(part)
    return found


def _phases(events: list[tuple[object, ...]]) -> list[list[tuple[object, ...]]]:
    cuts = [0, *(at for at, event in enumerate(events) if event[0] == "mark"), len(events)]
    return [events[a:b] for a, b in pairwise(cuts)]


def _inserted(few: list[tuple[object, ...]], more: list[tuple[object, ...]]) -> list[_Site]:
    """Return the fewest runs of events to insert into ``few`` so that it becomes ``more``.

    Raises:
        Untraceable: ``more`` has not all events of ``few``, in their order.
    """
    extra = len(more) - len(few)
    if extra < 0:
        raise Untraceable("a deeper model has fewer events")
    head = next((n for n, (a, b) in enumerate(zip(few, more, strict=False)) if a != b), len(few))
    if more[head + extra :] == few[head:]:
        return [_Site(head, extra)] if extra else []
    tail = 0
    while tail < len(few) - head and few[-1 - tail] == more[-1 - tail]:
        tail += 1
    inner = _fewest_runs(few[head : len(few) - tail], more[head : len(more) - tail])
    return [_Site(head + site.at, site.length) for site in inner]


def _fewest_runs(few: list[tuple[object, ...]], more: list[tuple[object, ...]]) -> list[_Site]:
    """Align by dynamic programming over (events of ``few`` that are matched, events inserted so far)."""
    extra = len(more) - len(few)
    never = len(more) + 1
    # The fewest runs after a match, and after an insertion, per number of events inserted.
    matched, inserting = [0] + [never] * extra, [never] + [1] * extra
    steps: list[tuple[bytearray, bytearray]] = []
    for at in range(len(few) + 1):
        if at:
            came = bytearray(extra + 1)
            for k in range(extra + 1):
                best = min(matched[k], inserting[k])
                came[k] = inserting[k] < matched[k]
                matched[k] = best if few[at - 1] == more[at - 1 + k] else never
            inserting = [never] * (extra + 1)
        else:
            came = bytearray(extra + 1)
        opened = bytearray(extra + 1)
        for k in range(1, extra + 1):
            if at or k:
                opens = matched[k - 1] + 1 <= inserting[k - 1]
                inserting[k] = min(matched[k - 1] + 1, inserting[k - 1])
                opened[k] = opens
        steps.append((came, opened))
    if min(matched[extra], inserting[extra]) >= never:
        raise Untraceable("a deeper model lacks events of a shallower one")
    return _runs(steps, len(few), extra, inserts=inserting[extra] < matched[extra])


def _runs(steps: list[tuple[bytearray, bytearray]], at: int, extra: int, *, inserts: bool) -> list[_Site]:
    found: list[_Site] = []
    length = 0
    while at or extra:
        came, opened = steps[at]
        if inserts:
            length += 1
            inserts = not opened[extra]
            extra -= 1
            if not inserts:
                found.append(_Site(at, length))
                length = 0
        else:
            inserts = bool(came[extra])
            at -= 1
    return found[::-1]
