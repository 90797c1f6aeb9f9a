"""The footprint of a deep model, from traces of the same model with a few of its like layers.

    traces at 3, 4 and 5 layers ──what one more layer adds──► footprint at 80 layers

A step does the same in every like layer. So one more layer adds the same events in the same places: in the
forward pass, in the backward pass, and wherever an optimizer goes over all parameters. Two layers differ in
numbers (which block is freed, which layer it is) that grow by the same amount from layer to layer. Three
depths give these amounts, and show that the structure repeats. If it does not, the whole model is traced.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from torch import nn

from autobatch.footprint.predict import SIZES, Footprint, footprint, record_apart
from autobatch.footprint.program import Polynomial, Program, Untraceable
from autobatch.footprint.trace_mode import Label, Recording
from autobatch.footprint.trace_step import Setting

DEPTHS = (3, 4, 5)
"""Layers that are traced. The first and the last layer may differ from the others, as FSDP gathers ahead."""
LEAST_LAYERS = 8
"""Like layers from which on fewer of them are traced."""


class Stack(NamedTuple):
    """Like layers in one list of a model."""

    name: str
    """Full name of the list."""
    layers: int


class _Event(NamedTuple):
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


@dataclass(frozen=True)
class _Site:
    """A place of the shallowest trace where each further layer adds events."""

    at: int
    """Number of events before it."""
    length: int


@dataclass(frozen=True)
class DeepFootprint:
    """The footprint of a step, from which those on other numbers of ranks follow by a single trace."""

    step: Footprint
    traced: Footprint
    """The footprint that was traced: of a few layers, or the step itself."""
    layers: int | None
    """Layers that it has; None for all."""
    _origins: tuple[int, ...]
    """For each event of the step, the place of the event that it repeats."""

    def on(self, setting: Setting, *, clock: Callable[[], float] = time.perf_counter) -> DeepFootprint:
        """Return the footprint of the same step with other sizes, for example on more ranks.

        Raises:
            Unpredictable: the step cannot be traced, or follows no rule in the micro-batch.
        """
        start = clock()
        shallow = setting
        if self.layers is not None:
            shallow = replace(setting, model=cut_to(setting.model, _stack_of(setting.model), self.layers))
        growth = _growth(self.traced, _as_footprint(record_apart(shallow, SIZES[0]), self.traced))
        if growth is None:
            return deep_footprint(setting)
        events = tuple(
            (block, None if rule is None else _plus(rule, growth[origin]))
            for (block, rule), origin in zip(self.step.program.events, self._origins, strict=True)
        )
        program = Program(events, self.step.program.marks)
        return replace(self, step=replace(self.step, program=program, seconds=clock() - start))


def deep_footprint(
    setting: Setting, *, tested: bool = True, clock: Callable[[], float] = time.perf_counter
) -> DeepFootprint:
    """Trace a step of a deep model by a few of its layers, and of any other model as it is.

    Args:
        setting: what to trace.
        tested: skip the self-test, because this torch has passed it.
        clock: returns seconds.

    Raises:
        Unpredictable: the step cannot be traced, or follows no rule in the micro-batch.
    """
    stack = like_layers(setting.model)
    start = clock()
    if stack is not None and stack.layers >= LEAST_LAYERS:
        # A model may count its layers elsewhere, and then runs at its own depth only.
        with suppress(Exception):
            found = _deepened(setting, stack, tested=tested)
            return replace(found, step=replace(found.step, seconds=clock() - start))
    step = footprint(setting, tested=tested, clock=clock)
    return DeepFootprint(step, step, None, tuple(range(len(step.program.events))))


def like_layers(model: nn.Module) -> Stack | None:
    """Return the list with the most elements whose members are all alike; None without any."""
    best: tuple[int, Stack] | None = None
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1:
            forms = {_form_of(child) for child in module}
            elements = sum(p.numel() for p in module.parameters())
            if len(forms) == 1 and elements and (best is None or elements > best[0]):
                best = elements, Stack(name, len(module))
    return None if best is None else best[1]


def cut_to(model: nn.Module, stack: Stack, layers: int) -> nn.Module:
    """Return a copy of a model with the first layers of a stack only; it shares the tensors."""
    tensors = [*model.parameters(), *model.buffers()]
    shallow = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    del shallow.get_submodule(stack.name)[layers:]  # type: ignore[operator]
    return shallow


def _form_of(layer: nn.Module) -> tuple[object, ...]:
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    return (
        tuple(type(module) for module in layer.modules()),
        tuple((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors),
    )


def _deepened(setting: Setting, stack: Stack, *, tested: bool) -> DeepFootprint:
    few, middle, many = (replace(setting, model=cut_to(setting.model, stack, depth)) for depth in DEPTHS)
    step = footprint(middle, tested=tested)
    others = [_events_of(_as_footprint(record_apart(one, SIZES[0]), step)) for one in (few, many)]
    events = deepen((others[0], _events_of(step), others[1]), stack.layers - DEPTHS[1])
    origins = tuple(event.origin for event in events if event.kind in ("take", "free"))
    return DeepFootprint(_footprint_of(step, events), step, DEPTHS[1], origins)


def _stack_of(model: nn.Module) -> Stack:
    stack = like_layers(model)
    assert stack is not None
    return stack


def _growth(step: Footprint, other: Footprint) -> list[int] | None:
    """Return by how many bytes each event of another trace is larger; None if they differ in more."""
    pairs = list(zip(_events_of(step), _events_of(other), strict=False))
    alike = all((a.kind, a.text, a.numbers) == (b.kind, b.text, b.numbers) for a, b in pairs)
    if not alike or len(step.program.events) != len(other.program.events):
        return None
    return [b.size - a.size for a, b in pairs if a.kind in ("take", "free")]


def _plus(rule: Polynomial, size: int) -> Polynomial:
    return rule._replace(constant=rule.constant + size * rule.denominator)


def deepen(traces: tuple[list[_Event], list[_Event], list[_Event]], layers: int) -> list[_Event]:
    """Return the events of a step with so many layers more than the second of three traces.

    Args:
        traces: at successive depths; the rules of the second are used.
        layers: layers to add to it.

    Raises:
        Untraceable: a layer does not add the same events each time.
    """
    few, middle, many = traces
    sites = _checked(_names_of(traces))
    found: list[_Event] = []
    position = [0, 0, 0]

    def one_of_each() -> None:
        three = few[position[0]], middle[position[1]], many[position[2]]
        found.append(_grown(*three, layers))
        for number in range(3):
            position[number] += 1

    for site in sites:
        while position[0] < site.at:
            one_of_each()
        chunk = middle[position[1] : position[1] + site.length]
        first = many[position[2] : position[2] + site.length]
        second = many[position[2] + site.length : position[2] + 2 * site.length]
        for repetition in range(layers + 1):
            found += [
                _repeated(*three, layers, repetition) for three in zip(chunk, first, second, strict=True)
            ]
        position[1] += site.length
        position[2] += 2 * site.length
    while position[0] < len(few):
        one_of_each()
    return found


def _grown(few: _Event, middle: _Event, many: _Event, layers: int) -> _Event:
    """Return an event that occurs once, in a deeper model."""
    numbers = []
    for a, b, c in zip(few.numbers, middle.numbers, many.numbers, strict=True):
        if c - b != b - a:
            raise Untraceable(f"a number of an event is {a}, {b} and {c} with {DEPTHS} layers")
        numbers.append(b + layers * (b - a))
    growth = middle.size - few.size
    if many.size - middle.size != growth:
        raise Untraceable(f"an allocation has {few.size}, {middle.size} and {many.size} bytes")
    rule = None if middle.rule is None else _plus(middle.rule, layers * growth)
    return middle._replace(numbers=tuple(numbers), rule=rule)


def _repeated(one: _Event, first: _Event, second: _Event, layers: int, repetition: int) -> _Event:
    """Return an event of a layer, in a deeper model: ``one`` in the middle trace, and both in the deepest."""
    if not one.size == first.size == second.size:
        raise Untraceable(f"an allocation of a layer has {one.size}, {first.size} and {second.size} bytes")
    numbers = (
        a + layers * (b - a) + repetition * (c - b)
        for a, b, c in zip(one.numbers, first.numbers, second.numbers, strict=True)
    )
    return one._replace(numbers=tuple(numbers))


def _names_of(traces: Sequence[list[_Event]]) -> list[list[tuple[object, ...]]]:
    """Return the events of traces without their numbers; a size that some trace lacks is left out."""
    common = set.intersection(*({event.size for event in events} for events in traces))
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


def _as_footprint(recording: Recording, step: Footprint) -> Footprint:
    """Return the footprint of one recording, with what a fit does not change taken from another."""
    events = tuple((block, None if size < 0 else Polynomial(size)) for block, size in recording.trace.events)
    return replace(
        step,
        program=Program(events, recording.trace.marks),
        labels=recording.labels,
        first_products=recording.first_products,
        products=recording.products,
    )


def _events_of(step: Footprint) -> list[_Event]:
    """Return the events of a footprint with its marks and products between them."""
    between: dict[int, list[_Event]] = {}
    for at, phase in step.program.marks:
        between.setdefault(at, []).append(_Event("mark", phase, 0, ()))
    for kind, places in (("first", step.first_products), ("product", step.products)):
        for at in places:
            between.setdefault(at, []).append(_Event(kind, "", 0, ()))
    found: list[_Event] = []
    sizes: dict[int, int] = {}
    for index, (block, rule) in enumerate(step.program.events):
        found += between.get(index, [])
        kind, module = step.labels[block]
        text = f"{kind} {re.sub(r'[0-9]+', '#', module)}"
        if rule is None:
            found.append(_Event("free", text, sizes[block], (block, *_digits(module)), index))
        else:
            sizes[block] = rule.at(SIZES[0])
            found.append(_Event("take", text, sizes[block], (block, *_digits(module)), index, rule))
    return found + between.get(len(step.program.events), [])


def _digits(module: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in re.findall(r"[0-9]+", module))


def _footprint_of(step: Footprint, found: list[_Event]) -> Footprint:
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


def _label(event: _Event) -> Label:
    words = event.text.rsplit(" ", 1)
    numbers = iter(event.numbers[1:])
    return Label(words[0], re.sub("#", lambda _: str(next(numbers)), words[1]))
