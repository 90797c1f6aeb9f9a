"""The footprint of a deep model, from traces of the same model with a few of its like layers.

    traces at 2, 3 and 4 layers ──what one more layer adds──► footprint at 80 layers

A step does the same in every like layer. So one more layer adds the same events in the same places: in the
forward pass, in the backward pass, and wherever an optimizer goes over all parameters. Two layers differ in
numbers (which block is freed, which layer it is) that grow by the same amount from layer to layer. Three
depths give these amounts, and show that the structure repeats. If it does not, the whole model is traced.
The places are where the deeper of two traces has events that the other one lacks.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from autobatch.device.allocator.trace import FREE, Trace
from autobatch.footprint.fit import SIZES, Footprint, footprint, footprint_beside, record_apart
from autobatch.footprint.program import Program, Rule, TooLong, Untraceable
from autobatch.footprint.tracing.trace_mode import Label, Product, Recording
from autobatch.footprint.tracing.trace_step import Setting

DEPTHS = (2, 3, 4)
"""Layers that are traced. The first and the last layer may differ from the others, as FSDP gathers ahead."""
LEAST_LAYERS = 8
"""Like layers from which on fewer of them are traced."""


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

    def on(self, setting: Setting, recording: Recording | None = None) -> DeepFootprint:
        """Return the footprint of the same step with other sizes, for example on more ranks.

        Args:
            setting: the step.
            recording: of `record_few`; None to record it now.

        Raises:
            Unpredictable: the step cannot be traced, or follows no rule in the micro-batch.
        """
        found = recording or record_few(setting, self.layers)
        before = self.traced.program.at(SIZES[0])
        orders = [[(block, size == FREE) for block, size in one.events] for one in (before, found.trace)]
        is_alike = orders[0] == orders[1] and before.marks == found.trace.marks
        if not is_alike or (self.traced.labels, self.traced.products) != (found.labels, found.products):
            return deep_footprint(setting)
        growth = [b - a for (_, a), (_, b) in zip(before.events, found.trace.events, strict=True)]
        events = tuple(
            (block, None if rule is None else rule.plus(growth[origin]))
            for (block, rule), origin in zip(self.step.program.events, self._origins, strict=True)
        )
        program = Program(events, self.step.program.marks)
        return replace(self, step=replace(self.step, program=program))


def is_deep(model: nn.Module) -> bool:
    """Return whether a few layers of a model are traced in place of all."""
    stack = like_layers(model)
    return stack is not None and stack.layers >= LEAST_LAYERS


def record_few(setting: Setting, layers: int | None = DEPTHS[1]) -> Recording:
    """Trace a step of a deep model at the depth and the size that `DeepFootprint.on` compares.

    Args:
        setting: the step.
        layers: None for all of them.

    Raises:
        Unpredictable: the step cannot be traced.
    """
    model = setting.model if layers is None else cut_to(setting.model, layers)
    return record_apart((replace(setting, model=model), SIZES[0]))[0]


def deep_footprint(setting: Setting, *, most_tensors: int | None = None) -> DeepFootprint:
    """Trace a step of a deep model by a few of its layers, and of any other model as it is.

    Args:
        setting: what to trace.
        most_tensors: parameter tensors of what is traced, above which it is not; None for no limit.

    Raises:
        TooLong: what is traced has more parameter tensors, or more operators than the setting allows.
        Unpredictable: the step cannot be traced, or follows no rule in the micro-batch.
    """
    stack = like_layers(setting.model)
    if stack is not None and stack.layers >= LEAST_LAYERS:
        few, middle, many = (replace(setting, model=cut_to(setting.model, depth)) for depth in DEPTHS)
        _check_size(many.model, most_tensors)
        # A model may count its layers elsewhere, and then runs at its own depth only.
        with suppress(Exception):
            traced, (shallow, deep) = footprint_beside(middle, [(few, SIZES[0]), (many, SIZES[0])])
            events = deepen(
                events_of(shallow.trace, shallow.labels, shallow.products),
                events_of(traced.program.at(SIZES[0]), traced.labels, traced.products),
                events_of(deep.trace, deep.labels, deep.products),
                stack.layers - DEPTHS[1],
            )
            origins = tuple(event.origin for event in events if event.numbers)
            return DeepFootprint(footprint_of(traced, events), traced, DEPTHS[1], origins)
    _check_size(setting.model, most_tensors)
    step = footprint(setting)
    return DeepFootprint(step, step, None, tuple(range(len(step.program.events))))


def _check_size(model: nn.Module, most_tensors: int | None) -> None:
    tensors = sum(1 for _ in model.parameters())
    if most_tensors is not None and tensors > most_tensors:
        raise TooLong(f"the model has {tensors:,} parameter tensors, more than {most_tensors:,}")


class Stack(NamedTuple):
    """Like layers of a model, in one list or in several of the same length, as an encoder and a decoder."""

    names: tuple[str, ...]
    """Full names of the lists."""
    layers: int
    """Of each list."""


def like_layers(model: nn.Module) -> Stack | None:
    """Return the list with the most elements whose members are all alike, and those as long as it.

    None without any. A list within another one's layers does not count.
    """
    found: dict[str, tuple[int, int]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1:
            elements = sum(p.numel() for p in module.parameters())
            if elements and len({_form_of(child) for child in module}) == 1:
                found[name] = elements, len(module)
    if not found:
        return None
    most = max(found, key=lambda name: found[name][0])
    names = [most]
    for name, (_, layers) in found.items():
        if layers == found[most][1] and not any(
            _is_within(name, one) or _is_within(one, name) for one in names
        ):
            names.append(name)
    return Stack(tuple(names), found[most][1])


def _is_within(name: str, other: str) -> bool:
    """Return whether a module is another one, or a part of it."""
    return f"{name}.".startswith(f"{other}.")


def cut_to(model: nn.Module, layers: int) -> nn.Module:
    """Return a copy of a model with the first of its like layers only; it shares the tensors."""
    stack = like_layers(model)
    assert stack is not None
    memo: dict[int, Any] = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    # Only the layers that stay are copied: a deep model has thousands of modules.
    for deep in map(model.get_submodule, stack.names):
        short = deep.__class__.__new__(deep.__class__)
        memo[id(deep)] = short
        kept = dict(list(deep._modules.items())[:layers])
        vars(short).update(copy.deepcopy({**vars(deep), "_modules": kept}, memo))
    return copy.deepcopy(model, memo)


def _form_of(layer: nn.Module) -> tuple[object, ...]:
    """Return what like layers share: modules with the attributes that decide what they do, and tensors.

    Of a rate, such as that of dropout, it counts whether it is 0.
    """
    modules = (
        (
            type(module),
            *(
                (name, bool(value) if isinstance(value, float) else value)
                for name, value in vars(module).items()
                if not name.startswith("_") and isinstance(value, bool | str | float)
            ),
        )
        for module in layer.modules()
    )
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    return (*modules, *((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors))


Key: TypeAlias = tuple[object, ...]


class Event(NamedTuple):
    """An event of a program, or something that happens between two of them."""

    key: Key
    """What has to be equal in all layers, first of all what happens: ``("take", kind of memory, module)``,
    ``("free", kind of memory, module, phases since it was taken)``, ``("mark", phase)``, or ``("product",
    is_backward, is_fused)``. The name of a module has ``#`` in place of its numbers."""
    size: int = 0
    """Bytes at the first micro-batch that is traced."""
    numbers: tuple[int, ...] = ()
    """The block, and the numbers in the name of the module; empty between two events of a program."""
    origin: int = 0
    """Number of allocations and frees before it in its trace."""
    growth: int = 0
    """Bytes that it has more than its origin."""


def events_of(trace: Trace, labels: Sequence[Label], products: Sequence[Product]) -> list[Event]:
    """Return the events of a step at the first micro-batch, with its marks and products between them."""
    between: dict[int, list[Event]] = {}
    for at, phase in trace.marks:
        between.setdefault(at, []).append(Event(("mark", phase)))
    for product in products:
        between.setdefault(product.at, []).append(Event(("product", *product[1:])))
    found: list[Event] = []
    taken: dict[int, tuple[int, int]] = {}
    """Size of each block, and the phases before it."""
    phases = 0
    for index, (block, size) in enumerate(trace.events):
        here = between.get(index, [])
        phases += sum(event.key[0] == "mark" for event in here)
        found += here
        kind, module = labels[block]
        name = re.sub(r"[0-9]+", "#", module)
        numbers = (block, *map(int, re.findall(r"[0-9]+", module)))
        if size == FREE:
            held, before = taken[block]
            # The time that blocks were held tells those apart that are freed in a row.
            found.append(Event(("free", kind, name, phases - before), held, numbers, index))
        else:
            taken[block] = size, phases
            found.append(Event(("take", kind, name), size, numbers, index))
    return found + between.get(len(trace.events), [])


def footprint_of(traced: Footprint, events: Sequence[Event]) -> Footprint:
    """Return the footprint of events that repeat those of another one.

    Raises:
        Untraceable: the events do not number their blocks in order, or free a block that is not live.
    """
    found: list[tuple[int, Rule | None]] = []
    labels: list[Label] = []
    marks: list[tuple[int, str]] = []
    products: list[Product] = []
    live: set[int] = set()
    for event in events:
        what, *rest = event.key
        if what == "mark":
            marks.append((len(found), str(rest[0])))
            continue
        if what == "product":
            products.append(Product(len(found), *map(bool, rest[:2])))
            continue
        block, *digits = event.numbers
        rule = traced.program.events[event.origin][1]
        if rule is not None:
            if block != len(labels):
                raise Untraceable(f"block {block} of a deeper model is taken as number {len(labels)}")
            live.add(block)
            first, *others = str(rest[1]).split("#")
            module = first + "".join(f"{n}{part}" for n, part in zip(digits, others, strict=True))
            labels.append(Label(str(rest[0]), module))
            rule = rule.plus(event.growth)
        elif block in live:
            live.remove(block)
        else:
            raise Untraceable("a block of a deeper model is freed before it is taken, or twice")
        found.append((block, rule))
    program = Program(tuple(found), tuple(marks))
    return replace(traced, program=program, labels=tuple(labels), products=tuple(products))


def deepen(few: list[Event], middle: list[Event], many: list[Event], layers: int) -> list[Event]:
    """Return the events of a step that has this many more layers than the second of three traces.

    Args:
        few: of a trace; those of the other two have one and two more layers.
        middle: origins are places in this trace.
        many: the deepest trace.
        layers: layers to add to the middle one.

    Raises:
        Untraceable: a layer does not add the same events each time.
    """
    few, middle, many = _with_sizes(few, middle, many)
    keys = [[event.key for event in trace] for trace in (few, middle, many)]
    found: list[Event] = []
    a = b = c = 0
    """Events of each trace that are done."""
    for places, length in [*_added(keys[0], keys[1]), (range(len(few), len(few) + 1), 0)]:
        open_at = range(min(places), max(places))
        rest = (
            few[open_at.start : open_at.stop],
            middle[b - a + open_at.start :],
            many[c - a + open_at.start :],
        )
        place = next((one for one in places if _is_even(*rest, one - open_at.start, length)), places[0])
        count = place - a
        if keys[0][a:place] != keys[2][c : c + count]:
            raise Untraceable("a further layer does not add the same events in the same places")
        once = zip(few[a:place], middle[b : b + count], many[c : c + count], strict=True)
        found += [_grown(*each, layers) for each in once]
        a, b, c = place, b + count, c + count
        for part in _parts(keys[1][b : b + length], keys[2][c : c + 2 * length]):
            found += _repeated(
                middle[b : b + part], many[c : c + part], many[c + part : c + 2 * part], layers
            )
            b, c = b + part, c + 2 * part
    if c != len(many):
        raise Untraceable("two further layers do not add twice what one adds")
    return found


def _with_sizes(*traces: list[Event]) -> list[list[Event]]:
    """Return the events of three traces with sizes in their keys, but for those that grow with the depth."""
    few, middle, many = (Counter(event.size for event in events) for events in traces)
    # A size that grows with the depth, for example that of the norms of all parameters, may be that of a
    # layer's block at one depth. The number of blocks of that size then grows unevenly.
    common = {size for size in few if many[size] - middle[size] == middle[size] - few[size] >= 0}
    return [
        [event._replace(key=(*event.key, event.size if event.size in common else None)) for event in events]
        for events in traces
    ]


def _is_even(few: list[Event], middle: list[Event], many: list[Event], place: int, length: int) -> bool:
    """Return whether these events grow evenly if each layer adds so many others before one of them."""
    for at, one in enumerate(few):
        skipped = length * (at >= place)
        others = middle[at + skipped], many[at + 2 * skipped]
        if any(
            b - a != c - b for a, b, c in zip(one.numbers, *(other.numbers for other in others), strict=False)
        ):
            return False
    return True


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
    return middle._replace(numbers=tuple(numbers), growth=layers * growth)


def _repeated(chunk: list[Event], first: list[Event], second: list[Event], layers: int) -> list[Event]:
    """Return the events of a layer, and of all that a deeper model adds to it.

    Args:
        chunk: the events in the middle trace.
        first: the same in the deepest trace.
        second: those of the next layer there.
        layers: layers that the deeper model has more than the middle trace.
    """
    for one, other, later in zip(chunk, first, second, strict=True):
        if not one.size == other.size == later.size:
            raise Untraceable(f"an allocation of a layer has {one.size}, {other.size} and {later.size} bytes")
    return [
        one._replace(
            numbers=tuple(
                a + layers * (b - a) + times * (c - b)
                for a, b, c in zip(one.numbers, other.numbers, later.numbers, strict=True)
            )
        )
        for times in range(layers + 1)
        for one, other, later in zip(chunk, first, second, strict=True)
    ]


def _parts(chunk: list[Key], twice: list[Key]) -> list[int]:
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


def _added(few: list[Key], more: list[Key]) -> list[tuple[range, int]]:
    """Return places where ``more`` has events that ``few`` lacks, and how many, phase by phase.

    Equal events in a row leave a place open. All places that it may be are returned, the likeliest first.
    """
    cuts = [[0, *(at for at, key in enumerate(keys) if key[0] == "mark"), len(keys)] for keys in (few, more)]
    found: list[tuple[range, int]] = []
    for (start, end), (begin, stop) in zip(*map(pairwise, cuts), strict=True):
        for places, length in _inserted(few[start:end], more[begin:stop]):
            found.append((range(start + places.start, start + places.stop, places.step), length))
    return found


def _inserted(few: list[Key], more: list[Key]) -> list[tuple[range, int]]:
    """Return runs of events to insert into ``few`` so that it becomes ``more``, as `_added` does.

    At each difference, insert the events after which the two agree for longest.

    Raises:
        Untraceable: ``more`` has not all events of ``few``, in their order.
    """
    extra = len(more) - len(few)
    found: list[tuple[range, int]] = []
    done, at = 0, _agreement(few, 0, more, 0)
    while at < len(few) or extra > 0:
        start = len(more) - (len(few) - at) - extra
        agreements = [_agreement(few, at, more, start + length) for length in range(1, extra + 1)]
        longest = max(agreements, default=0)
        if not longest and at < len(few):
            raise Untraceable("a deeper model lacks events of a shallower one")
        # The fewest runs: all events are inserted at once if the rest of both then agrees.
        length = extra if agreements[-1] == longest else 1 + agreements.index(longest)
        first = at
        while first > done and few[first - 1] == more[start + length - (at - first) - 1]:
            first -= 1
        # The first place of a phase is likely as late as possible, as that of a forward pass, and the others
        # are as early, as those of frees.
        found.append((range(first, at + 1) if found else range(at, first - 1, -1), length))
        extra -= length
        done, at = at, at + longest
    return found


def _agreement(few: list[Key], at: int, more: list[Key], start: int) -> int:
    """Return the number of events that are equal from these places on."""
    pairs = zip(range(at, len(few)), range(start, len(more)), strict=False)
    return next((a - at for a, b in pairs if few[a] != more[b]), min(len(few) - at, len(more) - start))
