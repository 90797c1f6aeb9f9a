"""The events of a footprint as a list, with its marks and products between them, and back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from autobatch.footprint.fit import SIZES, Footprint
from autobatch.footprint.program import Program, Rule, Untraceable
from autobatch.footprint.tracing.recording import Label, Product

_PRODUCT = ("backward", "fused")
"""Words for what `Product` tells beside its place."""


class Event(NamedTuple):
    """An event of a program, or something that happens between two of them."""

    kind: str
    """``take``, ``free``, ``mark`` or ``product``."""
    text: str
    """What has to be equal in all layers: the phase, the kind of memory, the module without its number."""
    size: int
    """Bytes at the first micro-batch that is traced."""
    numbers: tuple[int, ...]
    """The block, and the numbers in the name of the module."""
    origin: int = 0
    """Number of allocations and frees before it in its trace."""
    rule: Rule | None = None
    """Bytes at any micro-batch."""


def events_of(step: Footprint) -> list[Event]:
    """Return the events of a footprint with its marks and products between them."""
    between: dict[int, list[Event]] = {}
    for at, phase in step.program.marks:
        between.setdefault(at, []).append(Event("mark", phase, 0, ()))
    for product in step.products:
        text = " ".join(name for name, value in zip(_PRODUCT, product[1:], strict=True) if value)
        between.setdefault(product.at, []).append(Event("product", text, 0, ()))
    found: list[Event] = []
    taken: dict[int, tuple[int, int]] = {}
    """Size of each block, and the phases before it."""
    phases = 0
    for index, (block, rule) in enumerate(step.program.events):
        here = between.get(index, [])
        phases += sum(event.kind == "mark" for event in here)
        found += here
        kind, module = step.labels[block]
        text = f"{kind} {re.sub(r'[0-9]+', '#', module)}"
        if rule is None:
            size, before = taken[block]
            # The time that blocks were held tells those apart that are freed in a row.
            text = f"{text} {phases - before}"
            found.append(Event("free", text, size, (block, *_digits(module)), index))
        else:
            taken[block] = rule.at(SIZES[0]), phases
            found.append(Event("take", text, taken[block][0], (block, *_digits(module)), index, rule))
    return found + between.get(len(step.program.events), [])


def _digits(module: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in re.findall(r"[0-9]+", module))


class Run(NamedTuple):
    """Events in a row that occur several times, each time with numbers that have grown."""

    events: list[Event]
    """The events as they occur first."""
    steps: list[tuple[int, ...]]
    """By how much each number of each event grows from one time to the next."""
    times: int

    @classmethod
    def once(cls, events: list[Event]) -> Self:
        """Return a run of events that occur once."""
        return cls(events, [(0,) * len(event.numbers) for event in events], 1)


def footprint_of(step: Footprint, runs: list[Run]) -> tuple[Footprint, tuple[int, ...]]:
    """Return the footprint of runs of events, and for each event of its program the origin.

    Raises:
        Untraceable: the events do not number their blocks in order, or free a block that is not live.
    """
    found = _Unrolled()
    for run in runs:
        found.add(run)
    blocks, is_taken = np.concatenate(found.blocks), np.concatenate(found.is_taken)
    _check_numbers(blocks, is_taken)
    program = Program(tuple(zip(blocks.tolist(), found.rules, strict=True)), tuple(found.marks))
    made = replace(
        step,
        program=program,
        labels=tuple(found.labels),
        products=tuple(found.products),
    )
    return made, tuple(found.origins)


@dataclass
class _Unrolled:
    """The events of runs: a deep model has hundreds of thousands, so most of this works on whole columns."""

    blocks: list[NDArray[np.int64]] = field(default_factory=list)
    is_taken: list[NDArray[np.bool_]] = field(default_factory=list)
    rules: list[Rule | None] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)

    def add(self, run: Run) -> None:
        """Add the events of a run."""
        own = [(one, steps) for one, steps in zip(run.events, run.steps, strict=True) if one.numbers]
        taken = [(one, steps) for one, steps in own if one.kind == "take"]
        self._add_between(run, len(own))
        times = np.arange(run.times)[:, None]
        starts = np.array([event.numbers[0] for event, _ in own], np.int64)
        self.blocks.append((starts + times * np.array([step[0] for _, step in own], np.int64)).ravel())
        self.is_taken.append(np.tile(np.array([one.kind == "take" for one, _ in own], np.bool_), run.times))
        self.rules += [event.rule for event, _ in own] * run.times
        self.origins += [event.origin for event, _ in own] * run.times
        columns = [_labels(event, steps, run.times) for event, steps in taken]
        self.labels += chain.from_iterable(zip(*columns, strict=True))

    def _add_between(self, run: Run, length: int) -> None:
        """Add the events between allocations and frees."""
        at = len(self.rules)
        between: list[tuple[int, Event]] = []
        for event in run.events:
            if event.numbers:
                at += 1
            else:
                between.append((at, event))
        for time in range(run.times if between else 0):
            for place, event in between:
                if event.kind == "mark":
                    self.marks.append((place + time * length, event.text))
                else:
                    flags = (name in event.text for name in _PRODUCT)
                    self.products.append(Product(place + time * length, *flags))


def _check_numbers(blocks: NDArray[np.int64], is_taken: NDArray[np.bool_]) -> None:
    places, taken, freed = np.flatnonzero(is_taken), blocks[is_taken], blocks[~is_taken]
    wrong = np.flatnonzero(taken != np.arange(len(taken)))
    if len(wrong):
        raise Untraceable(f"block {taken[wrong[0]]} of a deeper model is taken as number {wrong[0]}")
    is_known = len(freed) == 0 or 0 <= freed.min() <= freed.max() < len(taken)
    # Quicker than to look for unique numbers, which are known to be small.
    if not is_known or np.bincount(freed).max(initial=0) > 1:
        raise Untraceable("a block of a deeper model is freed twice, or never taken")
    if (places[freed] > np.flatnonzero(~is_taken)).any():
        raise Untraceable("a block of a deeper model is freed before it is taken")


def _labels(event: Event, steps: tuple[int, ...], times: int) -> list[Label]:
    """Return the labels of a block each time that it is taken."""
    kind, module = event.text.rsplit(" ", 1)
    numbers, growth = event.numbers[1:], steps[1:]
    if not any(growth):
        return [Label(kind, _name(module, numbers))] * times
    return [
        Label(kind, _name(module, [n + time * more for n, more in zip(numbers, growth, strict=True)]))
        for time in range(times)
    ]


def _name(module: str, numbers: Sequence[int]) -> str:
    """Return the name of a module whose numbers were replaced by ``#``."""
    first, *others = module.split("#")
    return first + "".join(f"{n}{part}" for n, part in zip(numbers, others, strict=True))
