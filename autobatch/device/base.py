"""The contract of a device: a memory budget, a way to enforce it, and readings.

A `Device` returns a `Meter` for whatever runs on it, a probe or a real run.
Nothing outside this package depends on the kind of a device.
"""

from __future__ import annotations

import copy
import gc
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import nn

from autobatch.core.errors import DoesNotFitError, InputError
from autobatch.core.records import DeviceRecord
from autobatch.core.units import MiB, format_bytes, parse_budget
from autobatch.device.allocator import Allocator, MemoryStats, NewAllocator

if TYPE_CHECKING:
    from autobatch.core.records import Precision
    from autobatch.device.trace import Trace

HEADROOM_LEAST_BYTES = 512 * MiB
"""The least headroom: for libraries that allocate past torch, the interpreter and loader workers."""
GPU_HEADROOM_SHARE = 0.05
"""Share of a GPU's memory that no budget takes by default, simulated GPUs included."""


class Meter:
    """Readings of one session on a device. Here they are those of a session in which nothing is counted."""

    phase = "setup"
    """The phase that runs; see `mark`."""

    def count(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that were made out of sight of the device (a batch, for example).

        Raises:
            torch.OutOfMemoryError: They do not fit in the budget.
        """
        return

    def uncounted(self) -> AbstractContextManager[None]:
        """Count nothing within the block: for work that stays on the host, such as collating a batch."""
        return nullcontext()

    def mark(self, phase: str) -> None:
        """Record that a phase of a step begins.

        They are ``setup``, ``forward``, ``loss`` (of a whole batch), ``backward`` and ``optimizer``.
        """
        self.phase = phase

    def enter_module(self, name: str) -> None:
        """Record that a module's forward pass runs from here on; empty for none."""
        return

    def stats(self) -> MemoryStats:
        """Read the allocator. In a probe, wait first until the device has finished its work."""
        return MemoryStats()

    def trace(self) -> Trace | None:
        """Return the allocation events since the session began; None if none are recorded."""
        return None


@contextmanager
def followed_modules(model: nn.Module, meter: Meter) -> Iterator[None]:
    """Tell a meter which module of a model runs, the innermost one, within the block.

    ``torch.utils.module_tracker.ModuleTracker`` does not serve: it has a set of names in place of a stack,
    and its hooks on gradients change what a recomputing model frees. Hooks on all modules warn where one is
    compiled.
    """
    names = {module: name for name, module in model.named_modules()}
    running: list[str] = []

    def enter(module: nn.Module, _: object) -> None:
        running.append(names[module])
        meter.enter_module(running[-1])

    def leave(module: nn.Module, *_: object) -> None:
        if running:
            running.pop()
            meter.enter_module(running[-1] if running else "")

    handles = [module.register_forward_pre_hook(enter) for module in names]
    handles += [module.register_forward_hook(leave, always_call=True) for module in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Device(ABC):
    """A place to train, with a memory budget. The answers here are those of operators that the CPU runs.

    Args:
        budget: Bytes that the allocator may hold, cached blocks included, and their source in words.
        name: Name of the device.
        total_bytes: Its memory.
        notes: For the description.
    """

    kind: ClassVar[str]
    """``cuda``, ``cpu`` or ``sim``: for reports and cache keys, never to decide anything."""
    gains_from_compile: ClassVar[bool] = False
    """True if ``torch.compile`` is worth trying unasked. On the CPU it rarely pays for its time."""
    compiler_missing: ClassVar[str | None] = None
    """Why ``torch.compile`` compiles nothing here, in words; None if it does."""
    optimizer_implementations: ClassVar[tuple[str, ...]] = ("default", "foreach", "fused")
    """The implementations of an optimizer that differ here."""

    torch_device = torch.device("cpu")
    """Device of the tensors."""
    compute_capability: tuple[int, int] | None = None
    """Major and minor of the GPU that runs the operators; None if the CPU runs them."""

    def __init__(
        self, budget: tuple[int, str], *, name: str, total_bytes: int, notes: Sequence[str] = ()
    ) -> None:
        self.budget_bytes, self._budget_source = budget
        self._name, self._total_bytes, self._notes = name, total_bytes, notes

    @property
    def new_allocator(self) -> NewAllocator:
        """A function that models its allocator: `Allocator` itself if it caches nothing."""
        return Allocator

    def native_precisions(self) -> tuple[Precision, ...]:
        """Return the precisions that it computes in without emulation, the fastest first on a GPU.

        16 bits that are slower than 32 are no choice. fp16 is one only without bf16: at the same speed, it
        needs a loss scale and overflows sooner.
        """
        capabilities = torch.cpu.get_capabilities()
        native = any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_tile"))
        return ("fp32", "bf16") if native else ("fp32",)

    def describe(self) -> DeviceRecord:
        """Read the machine anew and return name, total, budget and the other processes that hold memory."""
        return DeviceRecord(
            kind=self.kind,
            name=self._name,
            total_bytes=self._total_bytes,
            budget_bytes=self.budget_bytes,
            budget_source=self._budget_source,
            notes=list(self._notes),
        )

    @abstractmethod
    def session(self, *, is_probe: bool) -> AbstractContextManager[Meter]:
        """Return a meter of what runs within the block.

        A probe starts with an empty cache, raises ``torch.OutOfMemoryError`` over the budget and records its
        events. A real run keeps its speed, with the same limit if the device has it anyway.
        """

    def budgeted(self, budget_bytes: int) -> Self:
        """Return the same device with the budget of a probe, or with as much of it as is free."""
        other = copy.copy(self)
        other.budget_bytes = budget_bytes
        return other

    def refuses(self, stats: MemoryStats) -> str | None:
        """Return why a step that ran does not count as fitting (retries, for example); None if it fits."""
        return None

    def release(self) -> None:
        """Collect garbage, and free cached memory; call it outside of any ``except`` block."""
        gc.collect()

    def synchronize(self) -> None:  # noqa: B027 - the CPU has nothing to wait for
        """Wait until the device has finished its work. Operators on the CPU have when they return."""


def resolve_budget(
    asked: str | int | None,
    *,
    total_bytes: int,
    available: Sequence[tuple[int, str]],
    headroom_share: float,
    owner: str,
) -> tuple[int, str]:
    """Return the bytes that the allocator may hold, and how they were determined, in words.

    Args:
        asked: The user's budget, taken literally: a size or a share of the total. None for the available
            memory less a headroom.
        total_bytes: Memory of the device.
        available: Signed terms that add up to the available memory, each in bytes and in words.
        headroom_share: Share of the total to leave free; at least `HEADROOM_LEAST_BYTES` are left.
        owner: Name of the device in messages.

    Raises:
        InputError: The budget is no size, or exceeds the total.
        DoesNotFitError: Nothing is left after the headroom.
    """
    if asked is not None:
        budget_bytes = parse_budget(asked, whole_bytes=total_bytes)
        if budget_bytes > total_bytes:
            raise InputError(
                f"the memory budget is {format_bytes(budget_bytes)} ({asked}), but {owner} has "
                f"{format_bytes(total_bytes)} ({total_bytes} bytes): ask for no more than that"
            )
        return budget_bytes, f"as set: {asked}"
    headroom_bytes = max(int(total_bytes * headroom_share), HEADROOM_LEAST_BYTES)
    budget_bytes = min(sum(size for size, _ in available), total_bytes) - headroom_bytes
    share = "the least" if headroom_bytes == HEADROOM_LEAST_BYTES else f"{headroom_share:.0%} of the total"
    terms = [*available, (-headroom_bytes, f"headroom, {share}")]
    words = " ".join(f"{'+-'[size < 0]} {format_bytes(abs(size))} {term}" for size, term in terms)
    words = words.removeprefix("+ ")
    if budget_bytes <= 0:
        raise DoesNotFitError(
            f"no memory is left to train in on {owner}: {words}; "
            "end other processes that use it, or set --memory-budget, which takes no headroom off"
        )
    return budget_bytes, words
