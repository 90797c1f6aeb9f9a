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
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from autobatch.device.allocator.trace import FREE
from autobatch.footprint.fit import SIZES, Footprint, footprint, footprint_beside, record_apart
from autobatch.footprint.program import Polynomial, Program, Rule, TooLong, Untraceable
from autobatch.footprint.tracing.trace_mode import Label, Product, Recording
from autobatch.footprint.tracing.trace_step import Setting

DEPTHS = (2, 3, 4)
"""Layers that are traced. The first and the last layer may differ from the others, as FSDP gathers ahead."""
LEAST_LAYERS = 8
"""Like layers from which on fewer of them are traced."""


class Stack(NamedTuple):
    """Like layers in one list of a model."""

    name: str
    """Full name of the list."""
    layers: int


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

    def on(
        self,
        setting: Setting,
        recording: Recording | None = None,
    ) -> DeepFootprint:
        """Return the footprint of the same step with other sizes, for example on more ranks.

        Args:
            setting: the step.
            recording: of `record_few`; None to record it now.

        Raises:
            Unpredictable: the step cannot be traced, or follows no rule in the micro-batch.
        """
        start = time.perf_counter()
        if recording is None:
            recording = record_few(setting) if self.layers else record_apart((setting, SIZES[0]))[0]
        growth = _growth(self.traced, _as_footprint(recording))
        if growth is None:
            return deep_footprint(setting)
        events = tuple(
            (block, None if rule is None else rule.plus(growth[origin]))
            for (block, rule), origin in zip(self.step.program.events, self._origins, strict=True)
        )
        program = Program(events, self.step.program.marks)
        return replace(self, step=replace(self.step, program=program, seconds=time.perf_counter() - start))


def is_deep(model: nn.Module) -> bool:
    """Return whether a few layers of a model are traced in place of all."""
    stack = like_layers(model)
    return stack is not None and stack.layers >= LEAST_LAYERS


def record_few(setting: Setting) -> Recording:
    """Trace a step of a deep model at the depth and the size that `DeepFootprint.on` compares.

    Raises:
        Unpredictable: the step cannot be traced.
    """
    stack = like_layers(setting.model)
    assert stack is not None
    return record_apart((replace(setting, model=cut_to(setting.model, stack, DEPTHS[1])), SIZES[0]))[0]


def deep_footprint(
    setting: Setting,
    *,
    most_tensors: int | None = None,
) -> DeepFootprint:
    """Trace a step of a deep model by a few of its layers, and of any other model as it is.

    Args:
        setting: what to trace.
        most_tensors: parameter tensors of what is traced, above which it is not; None for no limit.

    Raises:
        TooLong: what is traced has more parameter tensors, or more operators than the setting allows.
        Unpredictable: the step cannot be traced, or follows no rule in the micro-batch.
    """
    start = time.perf_counter()
    stack = like_layers(setting.model)
    if stack is not None and stack.layers >= LEAST_LAYERS:
        few, middle, many = (cut_to(setting.model, stack, depth) for depth in DEPTHS)
        _check_size(many, most_tensors)
        # A model may count its layers elsewhere, and then runs at its own depth only.
        with suppress(Exception):
            found = _deepened(setting, (few, middle, many), stack.layers)
            return replace(found, step=replace(found.step, seconds=time.perf_counter() - start))
    _check_size(setting.model, most_tensors)
    step = footprint(setting)
    return DeepFootprint(step, step, None, tuple(range(len(step.program.events))))


def _check_size(model: nn.Module, most_tensors: int | None) -> None:
    tensors = sum(1 for _ in model.parameters())
    if most_tensors is not None and tensors > most_tensors:
        raise TooLong(f"the model has {tensors:,} parameter tensors, more than {most_tensors:,}")


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
    memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
    # Only the layers that stay are copied: a deep model has thousands of modules.
    deep = model.get_submodule(stack.name)
    short = deep.__class__.__new__(deep.__class__)
    memo[id(deep)] = short
    kept = dict(list(deep._modules.items())[:layers])
    vars(short).update(copy.deepcopy({**vars(deep), "_modules": kept}, memo))
    return copy.deepcopy(model, memo)


def _form_of(layer: nn.Module) -> tuple[object, ...]:
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    return (
        tuple((type(module), _switches_of(module)) for module in layer.modules()),
        tuple((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors),
    )


def _switches_of(module: nn.Module) -> tuple[object, ...]:
    """Return the attributes that decide what a module does; of a rate, such as dropout, if it is 0."""
    values = ((name, value) for name, value in vars(module).items() if not name.startswith("_"))
    return tuple(
        (name, bool(value) if isinstance(value, float) else value)
        for name, value in values
        if isinstance(value, bool | str | float)
    )


def _deepened(setting: Setting, models: tuple[nn.Module, nn.Module, nn.Module], layers: int) -> DeepFootprint:
    """Trace a model that was cut to three depths."""
    few, middle, many = (replace(setting, model=model) for model in models)
    step, recordings = footprint_beside(middle, [(few, SIZES[0]), (many, SIZES[0])])
    others = [events_of(_as_footprint(one)) for one in recordings]
    runs = deepen((others[0], events_of(step), others[1]), layers - DEPTHS[1])
    deep, origins = footprint_of(step, runs)
    return DeepFootprint(deep, step, DEPTHS[1], origins)


def _growth(step: Footprint, other: Footprint) -> list[int] | None:
    """Return by how many bytes each event of another trace is larger; None if they differ in more."""
    pairs = list(zip(events_of(step), events_of(other), strict=False))
    alike = all((a.key, a.numbers) == (b.key, b.numbers) for a, b in pairs)
    if not alike or len(step.program.events) != len(other.program.events):
        return None
    return [b.size - a.size for a, b in pairs if a.numbers]


def _as_footprint(recording: Recording) -> Footprint:
    """Return the footprint of one recording, whose sizes stay as they are."""
    events = tuple(
        (block, None if size == FREE else Polynomial(size)) for block, size in recording.trace.events
    )
    return Footprint.of(Program(events, recording.trace.marks), recording)


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
    rule: Rule | None = None
    """Bytes at any micro-batch."""


class Run(NamedTuple):
    """Events in a row that occur several times, each time with numbers that have grown."""

    events: list[Event]
    """The events as they occur first."""
    steps: list[tuple[int, ...]]
    """By how much each number of each event grows from one time to the next."""
    times: int


class _Site(NamedTuple):
    """A place of the shallower of two traces where the deeper one has more events."""

    at: int
    """Number of events before it."""
    length: int


def events_of(step: Footprint) -> list[Event]:
    """Return the events of a footprint with its marks and products between them."""
    between: dict[int, list[Event]] = {}
    for at, phase in step.program.marks:
        between.setdefault(at, []).append(Event(("mark", phase)))
    for product in step.products:
        between.setdefault(product.at, []).append(Event(("product", *product[1:])))
    found: list[Event] = []
    taken: dict[int, tuple[int, int]] = {}
    """Size of each block, and the phases before it."""
    phases = 0
    for index, (block, rule) in enumerate(step.program.events):
        here = between.get(index, [])
        phases += sum(event.key[0] == "mark" for event in here)
        found += here
        kind, module = step.labels[block]
        name = re.sub(r"[0-9]+", "#", module)
        numbers = (block, *map(int, re.findall(r"[0-9]+", module)))
        if rule is None:
            size, before = taken[block]
            # The time that blocks were held tells those apart that are freed in a row.
            found.append(Event(("free", kind, name, phases - before), size, numbers, index))
        else:
            size = rule.at(SIZES[0])
            taken[block] = size, phases
            found.append(Event(("take", kind, name), size, numbers, index, rule))
    return found + between.get(len(step.program.events), [])


def footprint_of(step: Footprint, runs: Sequence[Run]) -> tuple[Footprint, tuple[int, ...]]:
    """Return the footprint of runs of events, and for each event of its program the origin.

    Raises:
        Untraceable: the events do not number their blocks in order, or free a block that is not live.
    """
    events: list[tuple[int, Rule | None]] = []
    origins: list[int] = []
    labels: list[Label] = []
    marks: list[tuple[int, str]] = []
    products: list[Product] = []
    live: set[int] = set()
    for run in runs:
        for number in range(run.times):
            for event, steps in zip(run.events, run.steps, strict=True):
                what = event.key[0]
                if what == "mark":
                    marks.append((len(events), str(event.key[1])))
                    continue
                if what == "product":
                    products.append(Product(len(events), *map(bool, event.key[1:])))
                    continue
                block, *digits = (n + number * more for n, more in zip(event.numbers, steps, strict=True))
                if what == "take":
                    if block != len(labels):
                        raise Untraceable(f"block {block} of a deeper model is taken as number {len(labels)}")
                    live.add(block)
                    labels.append(Label(str(event.key[1]), _name(str(event.key[2]), digits)))
                elif block in live:
                    live.remove(block)
                else:
                    raise Untraceable("a block of a deeper model is freed before it is taken, or twice")
                events.append((block, event.rule))
                origins.append(event.origin)
    program = Program(tuple(events), tuple(marks))
    deep = replace(step, program=program, labels=tuple(labels), products=tuple(products))
    return deep, tuple(origins)


def _name(module: str, numbers: Sequence[int]) -> str:
    """Return the name of a module whose numbers were replaced by ``#``."""
    if not numbers:
        return module
    first, *others = module.split("#")
    return first + "".join(f"{n}{part}" for n, part in zip(numbers, others, strict=True))


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
            events = [_grown(a, b, c, layers) for a, b, c in zip(*parts, strict=True)]
            found.append(Run(events, [(0,) * len(event.numbers) for event in events], 1))
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


def _names_of(traces: Sequence[list[Event]]) -> list[list[Key]]:
    """Return the events of traces without their numbers, and without sizes that differ with the depth."""
    few, middle, many = (Counter(event.size for event in events) for events in traces)
    # A size that grows with the depth, for example that of the norms of all parameters, may be that of a
    # layer's block at one depth. The number of blocks of that size then grows unevenly.
    common = {size for size in few if many[size] - middle[size] == middle[size] - few[size] >= 0}
    return [
        [(*event.key, event.size if event.size in common else None) for event in events] for events in traces
    ]


def _checked(names: list[list[Key]]) -> list[_Site]:
    """Return the places where each further layer adds events.

    Raises:
        Untraceable: the deepest trace has not twice what the middle one adds to the shallowest.
    """
    few, middle, many = names
    built: list[Key] = []
    found: list[_Site] = []
    done = shift = 0
    for site in _sites(few, middle):
        start = site.at + shift
        chunk = middle[start : start + site.length]
        twice = many[start + shift : start + shift + 2 * site.length]
        found += [_Site(site.at, length) for length in _parts(chunk, twice)]
        built += few[done : site.at] + twice
        done, shift = site.at, shift + site.length
    if built + few[done:] != many:
        raise Untraceable("a further layer does not add the same events in the same places")
    return found


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


def _sites(few: list[Key], more: list[Key]) -> list[_Site]:
    """Return where ``more`` has events that ``few`` lacks, phase by phase."""
    found: list[_Site] = []
    start = 0
    for part, longer in zip(_phases(few), _phases(more), strict=True):
        found += [_Site(start + site.at, site.length) for site in _inserted(part, longer)]
        start += len(part)
    return found


def _phases(events: list[Key]) -> list[list[Key]]:
    cuts = [0, *(at for at, event in enumerate(events) if event[0] == "mark"), len(events)]
    return [events[a:b] for a, b in pairwise(cuts)]


def _inserted(few: list[Key], more: list[Key]) -> list[_Site]:
    """Return runs of events to insert into ``few`` so that it becomes ``more``.

    Where the two part, those events are inserted after which they agree for longest.

    Raises:
        Untraceable: ``more`` has not all events of ``few``, in their order.
    """
    extra = len(more) - len(few)
    found: list[_Site] = []
    done = 0
    at = _agreement(few, 0, more, 0)
    while at < len(few):
        start = len(more) - (len(few) - at) - extra
        agreements = [_agreement(few, at, more, start + length) for length in range(1, extra + 1)]
        longest = max(agreements, default=0)
        if not longest:
            raise Untraceable("a deeper model lacks events of a shallower one")
        # The fewest runs: all events are inserted at once if the rest of both then agrees.
        length = extra if agreements[-1] == longest else 1 + agreements.index(longest)
        # Equal events in a row leave the place open. Numbers grow evenly if the first place of a phase is as
        # late as possible, as that of a forward pass, and the others are as early, as those of frees.
        earlier = 0
        while found and earlier < at - done and few[at - earlier - 1] == more[start + length - earlier - 1]:
            earlier += 1
        found.append(_Site(at - earlier, length))
        extra -= length
        done = at
        at += longest
    return [*found, _Site(len(few), extra)] if extra > 0 else found


def _agreement(few: list[Key], at: int, more: list[Key], start: int) -> int:
    """Return the number of events that are equal from these places on."""
    pairs = zip(range(at, len(few)), range(start, len(more)), strict=False)
    return next((a - at for a, b in pairs if few[a] != more[b]), min(len(few) - at, len(more) - start))
