"""The events of a footprint as a list, with its marks and products between them, and back."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

from autobatch.footprint.predict import SIZES, Footprint
from autobatch.footprint.program import Polynomial, Program, Untraceable
from autobatch.footprint.trace_mode import Label


class Event(NamedTuple):
    """An event of a program, or something that happens between two of them."""

    kind: str
    """``take``, ``free``, ``mark``, ``first`` or ``product``."""
    text: str
    """What has to be equal in all layers: the phase, the kind of memory, the module without its number."""
    size: int
    """Bytes at the first micro-batch that is traced."""
    numbers: tuple[int, ...]
    """The block, and the numbers in the name of the module."""
    origin: int = 0
    """Number of allocations and frees before it in its trace."""
    rule: Polynomial | None = None
    """Bytes at any micro-batch."""


def events_of(step: Footprint) -> list[Event]:
    """Return the events of a footprint with its marks and products between them."""
    between: dict[int, list[Event]] = {}
    for at, phase in step.program.marks:
        between.setdefault(at, []).append(Event("mark", phase, 0, ()))
    for kind, places in (("first", step.first_products), ("product", step.products)):
        for at in places:
            between.setdefault(at, []).append(Event(kind, "", 0, ()))
    found: list[Event] = []
    sizes: dict[int, int] = {}
    for index, (block, rule) in enumerate(step.program.events):
        found += between.get(index, [])
        kind, module = step.labels[block]
        text = f"{kind} {re.sub(r'[0-9]+', '#', module)}"
        if rule is None:
            found.append(Event("free", text, sizes[block], (block, *_digits(module)), index))
        else:
            sizes[block] = rule.at(SIZES[0])
            found.append(Event("take", text, sizes[block], (block, *_digits(module)), index, rule))
    return found + between.get(len(step.program.events), [])


def _digits(module: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in re.findall(r"[0-9]+", module))


def footprint_of(step: Footprint, found: list[Event]) -> Footprint:
    """Return the footprint of events, and check that they number their blocks in order."""
    events: list[tuple[int, Polynomial | None]] = []
    marks: list[tuple[int, str]] = []
    places: dict[str, list[int]] = {"first": [], "product": []}
    labels: list[Label] = []
    live: set[int] = set()
    for event in found:
        if event.kind == "mark":
            marks.append((len(events), event.text))
        elif event.kind in places:
            places[event.kind].append(len(events))
        else:
            block = event.numbers[0]
            if event.kind == "take":
                if block != len(labels):
                    raise Untraceable(f"block {block} of a deeper model is taken as number {len(labels)}")
                live.add(block)
                labels.append(_label(event))
            elif block not in live:
                raise Untraceable(f"block {block} of a deeper model is freed twice")
            else:
                live.remove(block)
            events.append((block, event.rule))
    return replace(
        step,
        program=Program(tuple(events), tuple(marks)),
        labels=tuple(labels),
        first_products=tuple(places["first"]),
        products=tuple(places["product"]),
    )


def _label(event: Event) -> Label:
    words = event.text.rsplit(" ", 1)
    numbers = iter(event.numbers[1:])
    return Label(words[0], re.sub("#", lambda _: str(next(numbers)), words[1]))
