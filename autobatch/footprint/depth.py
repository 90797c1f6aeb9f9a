"""The footprint of a deep model, from traces of the same model with a few of its like layers.

    traces at 2, 3 and 4 layers ──what one more layer adds──► footprint at 80 layers

A step does the same in every like layer. So one more layer adds the same events in the same places: in the
forward pass, in the backward pass, and wherever an optimizer goes over all parameters. Two layers differ in
numbers (which block is freed, which layer it is) that grow by the same amount from layer to layer. Three
depths give these amounts, and show that the structure repeats. If it does not, the whole model is traced.
"""

from __future__ import annotations

import copy
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn

from autobatch.device.allocator.trace import FREE
from autobatch.footprint.fit import SIZES, Footprint, footprint, footprint_beside, record_apart
from autobatch.footprint.program import Polynomial, Program, TooLong
from autobatch.footprint.repeat_layers import deepen, events_of, footprint_of
from autobatch.footprint.tracing.recording import Recording
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
