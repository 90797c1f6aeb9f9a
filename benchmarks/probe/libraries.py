"""A GPU made of arithmetic: traced steps, with the scratch memory that CUDA's libraries take beside them.

A step is traced on fake tensors. Each operator that takes scratch on a GPU leaves a note with its shapes, so
that the allocations of the step at any micro-batch are known without running it. The rules are those of
torch's sources (aten/src/ATen, 2.11 to 2.15), simplified:

- A large reduction takes a staging buffer and semaphores, only if several blocks share an output
  (native/cuda/Reduce.cuh, ``setReduceConfig``).
- The gradient of an embedding sorts more than 3,072 indices: keys and values, cub's scratch in tiles, and a
  partial sum per segment (native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu).
- A convolution runs a plan with or without a workspace, chosen by the shape (native/cudnn/Conv_v8.cpp).
- cuBLAS keeps one workspace per thread until 2.14, and takes one at each product from 2.15 on
  (cuda/CublasHandlePool.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autobatch.core.records.probe import Attempt
from autobatch.core.units import MiB
from autobatch.device.allocator.caching import AllocatorConfig, CachingAllocator
from autobatch.device.allocator.trace import FREE, Trace, replay
from autobatch.footprint.program import Program
from autobatch.footprint.tracing.trace_mode import Recorder
from autobatch.footprint.tracing.trace_step import Setting, record
from autobatch.setup.attempt import (
    ATTEMPT_STEPS,
    NEAR_THE_LIMIT,
    OTHER_ATTEMPT_STEPS,
    Outcome,
)

aten = torch.ops.aten
PROCESSORS = 132
"""Of an H200."""
WORKSPACE = 32 * MiB
_SUMS = (aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim)
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


class Note(NamedTuple):
    """An operator that takes scratch."""

    kind: str
    before: int
    """Number of events before it."""
    after: int
    """Number of events after its results were allocated."""
    figures: tuple[int, ...]
    """Sizes that its scratch depends on; each is a line over the micro-batch."""


class NotingRecorder(Recorder):  # type: ignore[no-untyped-call]
    """A recorder that leaves notes, and repeats no step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.notes: list[Note] = []

    def repeat(self, since: tuple[int, int]) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.position
        out = super().__torch_dispatch__(func, types, args, kwargs)
        found = _figures(func, args, out)
        if found is not None:
            self.notes.append(Note(found[0], before, self.position, found[1]))
        return out


def _figures(func: Any, args: tuple[Any, ...], out: Any) -> tuple[str, tuple[int, ...]] | None:
    if func in _SUMS:
        return "sum", (out.numel(), args[0].numel() // max(out.numel(), 1), out.element_size())
    if func is aten.embedding_dense_backward.default:
        grad, indices, vocabulary = args[:3]
        return "embedding", (indices.numel(), int(vocabulary), grad.shape[-1])
    if func in _PRODUCTS:
        return "product", ()
    if func in _CONVOLUTIONS:
        tensors = (*args[:3], *(out if isinstance(out, tuple) else (out,)))
        sizes = [one.numel() * one.element_size() for one in tensors if isinstance(one, Tensor)]
        return "convolution", (max(sizes), args[0].shape[0])
    return None


@dataclass(frozen=True)
class Libraries:
    """The scratch of a GPU's libraries."""

    lasting_workspaces: bool = True
    """True until torch 2.14."""
    on: bool = True
    """False for no scratch besides the workspaces."""

    def blocks(self, number: int, note: Note, figures: Sequence[int], m: int) -> list[tuple[int, int, int]]:
        """Return ``(first event, last event, bytes)`` of the scratch of an operator, in order."""
        end = note.after
        if note.kind == "product":
            return [] if self.lasting_workspaces else [(end, end, WORKSPACE)]
        if not self.on:
            return []
        if note.kind == "sum":
            return [(end, end, size) for size in reduction_bytes(*figures)]
        if note.kind == "convolution":
            size = convolution_bytes(number, *figures)
            return [(end, end, size)] if size else []
        indices, vocabulary, width = figures
        if indices <= 3072:
            return []
        held = [(note.before, end, 8 * indices)] * 2  # keys and values, around the gradient itself
        tiles = -(-indices // 2048)
        temporary = [(note.before, note.before, 767 + 1024 * tiles)]
        rows = indices // 10 + min(indices, vocabulary)
        inner = [8 * indices, 8, 8 * indices, 8 * indices, 8, 8 * rows, 4 * rows * width]
        return [*held, *temporary, *((end, end, size) for size in inner)]


def reduction_bytes(outputs: int, inputs: int, element: int) -> list[int]:
    """Return the staging buffer and the semaphores of a reduction; nothing if one block per output does."""
    width = min(32, 1 << max(0, min(outputs, inputs).bit_length() - 1))
    height = max(1, 512 // width)
    values = inputs // (height if outputs >= width else width * height)
    grid = max(1, outputs // width if outputs >= width else outputs)
    target = PROCESSORS * (2048 // 512)
    if values < 256 or grid > target:
        return []
    shared = max(min(-(-target // grid), -(-values // 16)), -(-values // 256))
    return [element * outputs * shared * 2, 4 * grid] if shared > 1 else []


def convolution_bytes(number: int, largest: int, samples: int) -> int:
    """Return the workspace of a convolution's plan: none, one for transposes, or one in tiles past a size."""
    if number % 3 == 0:
        return 0
    if number % 3 == 1:
        return 2 * largest
    tiles = -(-samples // 8)
    return 0 if samples < 24 else largest // samples * tiles * 2


class Step(NamedTuple):
    """A traced step, in one order."""

    program: Program
    first_products: tuple[int, ...]
    notes: tuple[Note, ...]
    slopes: tuple[tuple[tuple[int, int], ...], ...]
    """Constant and slope of each figure of each note."""

    def at(self, m: int, libraries: Libraries) -> Trace:
        """Return the allocations at a micro-batch, scratch included."""
        extra: list[tuple[int, int, int]] = []
        if libraries.lasting_workspaces:
            extra += [(index, -1, WORKSPACE) for index in self.first_products]
        for number, (note, lines) in enumerate(zip(self.notes, self.slopes, strict=True)):
            figures = [constant + slope * m for constant, slope in lines]
            extra += libraries.blocks(number, note, figures, m)
        return _with_blocks(self.program.at(m), extra)


def _with_blocks(trace: Trace, extra: list[tuple[int, int, int]]) -> Trace:
    """Insert blocks that live from one event to another; -1 for blocks that stay."""
    starts: dict[int, list[tuple[int, int, int]]] = {}
    for number, (start, end, size) in enumerate(extra):
        starts.setdefault(start, []).append((-1 - number, end, size))
    ends: dict[int, list[int]] = {}
    events: list[tuple[int, int]] = []
    for index in range(len(trace.events) + 1):
        for block in reversed(ends.pop(index, [])):
            events.append((block, FREE))
        closing: list[int] = []
        for block, end, size in starts.get(index, []):
            events.append((block, size))
            if end == index:
                closing.append(block)
            elif end >= 0:
                ends.setdefault(end, []).append(block)
        events.extend((block, FREE) for block in reversed(closing))
        # What spans this operator's results ends after the scratch that was taken within.
        if index < len(trace.events):
            events.append(trace.events[index])
    return Trace(tuple(events)).canonical()


def trace_step(setting: Setting) -> Step:
    """Trace a step at a few sizes, with notes."""
    recorders: list[NotingRecorder] = []

    def made(**options: Any) -> NotingRecorder:
        recorders.append(NotingRecorder(**options))
        return recorders[-1]

    points = [(size, record(setting, size, recorder=made)) for size in (2, 3, 5)]
    program = Program.fit([(size, found.trace) for size, found in points])
    first, second = (recorder.notes for recorder in recorders[:2])
    slopes = tuple(
        tuple((2 * (a - b) + a, b - a) for a, b in zip(one.figures, other.figures, strict=True))
        for one, other in zip(first, second, strict=True)
    )
    return Step(program, points[0][1].first_products, tuple(first), slopes)


class SimulatedGpu:
    """Attempts of a workload on a GPU that is arithmetic, within a budget.

    Args:
        orders: the step in both orders of an attempt.
        budget: bytes that the allocator may hold.
        libraries: scratch of the GPU.
    """

    config = AllocatorConfig(retries=False)

    def __init__(self, orders: tuple[Step, Step], budget: int, libraries: Libraries) -> None:
        self.orders, self.budget, self.libraries = orders, budget, libraries
        self.asked: list[int] = []
        self._known: dict[int, Outcome] = {}

    def new_allocator(self) -> CachingAllocator:
        return CachingAllocator(self.budget, self.config)

    def run(self, m: int) -> Outcome:
        """Make an attempt, and count it."""
        self.asked.append(m)
        return self.outcome(m)

    def outcome(self, m: int) -> Outcome:
        """Return the outcome of an attempt."""
        if m not in self._known:
            self._known[m] = self._attempt(m)
        return self._known[m]

    def _attempt(self, m: int) -> Outcome:
        first, reserved = self._ran(self.orders[0], m)
        attempt = Attempt(
            micro_batch=m,
            fits=first is not None,
            peak_allocated_bytes=reserved,
            peak_reserved_bytes=reserved,
            seconds=0.0,
            reason=None if first is not None else "out of memory",
        )
        if first is None or reserved < NEAR_THE_LIMIT * self.budget:
            return Outcome(attempt, first)
        other, more = self._ran(self.orders[1], m)
        if other is None:
            attempt = Attempt(
                micro_batch=m, fits=False, peak_allocated_bytes=more, peak_reserved_bytes=more,
                seconds=0.0, reason="out of memory",
            )  # fmt: skip
        return Outcome(attempt, first, other)

    def _ran(self, order: Step, m: int) -> tuple[Trace | None, int]:
        trace = order.at(m, self.libraries)
        found = replay(trace, self.new_allocator())
        return (trace if found.fits else None), found.peak_reserved_bytes or 0

    def limit(self, around: int, cap: int) -> int:
        """Return the largest micro-batch that fits, by bisection from an answer and all sizes near it."""
        low, high, stride = 0, around or 1, 1
        while high <= cap and self.outcome(high).attempt.fits:
            low, high, stride = high, min(high + stride, cap + 1), 2 * stride
        if low == 0:
            while high > 1 and not self.outcome(high).attempt.fits:
                high //= 2
            low, high = (high, around) if self.outcome(high).attempt.fits else (0, 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.outcome(middle).attempt.fits else (low, middle)
        return low


def both_orders(setting: Setting) -> tuple[Step, Step]:
    """Trace a step in both orders of an attempt."""
    return (
        trace_step(replace(setting, steps=ATTEMPT_STEPS)),
        trace_step(replace(setting, steps=OTHER_ATTEMPT_STEPS)),
    )
