"""A CUDA GPU as a device: its budget is what the driver has free, and torch's allocator enforces it.

Importing this module touches no GPU. `CudaDevice` creates the CUDA context when it is built, so that free
memory is read after the context has taken its share. The cap (``set_per_process_memory_fraction``) limits
reserved bytes. A step that exceeds it raises ``torch.OutOfMemoryError`` even if the GPU has memory left, so a
probe cannot hurt other processes.

The allocator records every allocation and free with the requested size, workspaces of libraries included. So
a run on a GPU gives a `Trace`, as a run on the CPU does. A phase begins after as many events as torch's
statistics count at its mark. That is exact, which the times of the events are not.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from autobatch.core.errors import DoesNotFitError, InputError
from autobatch.core.records import DeviceRecord
from autobatch.core.units import MiB, format_bytes
from autobatch.device import host
from autobatch.device.allocator import CachingAllocator, MemoryStats, NewAllocator
from autobatch.device.base import GPU_HEADROOM_SHARE, Device, Meter, resolve_budget
from autobatch.device.oom import first_line, is_oom
from autobatch.device.trace import Trace, trace_of

if TYPE_CHECKING:
    from autobatch.core.records import Precision

MOST_EVENTS = 300_000
"""Most events of a recording. A longer one would lack its beginning. 25,000 are usual, and a snapshot makes a
Python object of each."""
_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables of the allocator's options. The first that is set counts, even if empty
(c10/core/AllocatorConfig.cpp)."""
TAKES_LOWEST = torch.__version__ < "2.13"
"""True if the lowest of equal blocks comes first, so that the order of the driver's segments counts. From
2.13 on, it is that of the oldest segment, wherever the driver has put it."""


def fraction_of(limit_bytes: int, total_bytes: int) -> float:
    """Return the smallest fraction of the memory that allows all bytes of the limit.

    The allocator multiplies and truncates. One byte less would lose a segment of a limit of whole segments.
    """
    fraction = min(limit_bytes / total_bytes, 1.0)
    while fraction < 1.0 and int(fraction * total_bytes) < limit_bytes:
        fraction = math.nextafter(fraction, 1.0)
    return fraction


def segments_fall(index: int) -> bool:
    """Return whether the driver puts each new segment below those before it; three of 20 MiB tell."""
    made = [torch.empty(20 * MiB, dtype=torch.uint8, device=f"cuda:{index}") for _ in range(3)]
    addresses = [tensor.data_ptr() for tensor in made]
    del made
    torch.cuda.empty_cache()
    return addresses == sorted(addresses, reverse=True)


def allocator_options(environ: Mapping[str, str]) -> str:
    """Return the options of the allocator in the environment: those of the first variable that is set."""
    text = next((environ[name] for name in _VARIABLES if name in environ), "")
    return text.replace(" ", "").lower()


def unmodelled_options(environ: Mapping[str, str]) -> list[str]:
    """Return the options in the environment that `autobatch.device.allocator` does not know."""
    return re.findall(r"\b(?!expandable_segments)[a-z]\w*(?=:)", allocator_options(environ))


def free_workspaces() -> None:
    """Free the workspaces that cuBLAS keeps, and the pinned host memory that torch keeps for copies."""
    for module, name in (
        (torch._C, "_cuda_clearCublasWorkspaces"),  # kept until torch 2.14
        (torch.accelerator, "empty_host_cache"),  # not in torch 2.11
    ):
        if hasattr(module, name):
            getattr(module, name)()


class CudaMeter(Meter):
    """Readings of one session on a GPU. Peaks and retries count from its beginning.

    Args:
        waits: Whether readings wait until the GPU has finished its work, as in a probe.
        records: Whether the session is recorded.
    """

    def __init__(self, index: int, *, waits: bool, records: bool) -> None:
        self._index, self._waits, self._records = index, waits, records
        torch.cuda.reset_peak_memory_stats(index)
        # The flat dictionary takes 15 times as long, and a loop reads after every step.
        figures = torch.cuda.memory_stats_as_nested_dict(index)
        self._retries_before = figures["num_alloc_retries"]
        self._events_before = _count_events(figures) if records else 0
        self._marks: list[tuple[int, str]] = []
        self._modules: list[tuple[int, str]] = []

    def mark(self, phase: str) -> None:
        """Record that a phase begins, after the events so far."""
        super().mark(phase)
        self._note(self._marks, phase)

    def enter_module(self, name: str) -> None:
        """Record that a module's forward pass runs from here on; empty for none."""
        self._note(self._modules, name)

    def _note(self, notes: list[tuple[int, str]], name: str) -> None:
        if self._records:
            count = _count_events(torch.cuda.memory_stats_as_nested_dict(self._index))
            notes.append((count - self._events_before, name))

    def stats(self) -> MemoryStats:
        """Read the allocator, in bytes."""
        if self._waits:
            torch.cuda.synchronize(self._index)
        figures = torch.cuda.memory_stats_as_nested_dict(self._index)
        allocated, reserved = figures["allocated_bytes"]["all"], figures["reserved_bytes"]["all"]
        return MemoryStats(
            allocated_bytes=allocated["current"],
            reserved_bytes=reserved["current"],
            peak_allocated_bytes=allocated["peak"],
            peak_reserved_bytes=reserved["peak"],
            retries=figures["num_alloc_retries"] - self._retries_before,
        )

    def trace(self) -> Trace | None:
        """Return the events since the session began; None if it records none, or no replay of them is right.

        None is right if the beginning is lost, or blocks are in a private pool, as those of CUDA graphs: it
        shares no block with the others.
        """
        if not self._records:
            return None
        snapshot = torch.cuda.memory._snapshot(self._index)
        entries = snapshot["device_traces"][self._index]
        is_private = any(tuple(segment["segment_pool_id"]) != (0, 0) for segment in snapshot["segments"])
        is_cut = len(entries) >= MOST_EVENTS
        return None if is_private or is_cut else trace_of(entries, self._marks, self._modules)


def _count_events(figures: Mapping[str, Any]) -> int:
    """Return how many blocks the allocator has given and taken back since the process began."""
    active = figures["active"]["all"]
    return int(active["allocated"] + active["freed"])


UNCACHED = "PYTORCH_NO_CUDA_MEMORY_CACHING"
"""Any value of it switches torch's allocator off (c10/cuda/CUDACachingAllocator.cpp)."""


def visible_gpus() -> list[dict[str, Any]]:
    """Describe the GPUs that torch can use, in torch's order; none without a GPU or a CUDA build."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [
        {
            "index": index,
            "name": gpu.name,
            "uuid": str(gpu.uuid),
            "total_bytes": gpu.total_memory,
            "capability": f"{gpu.major}.{gpu.minor}",
        }
        for index, gpu in enumerate(map(torch.cuda.get_device_properties, range(count)))
    ]


class CudaDevice(Device):
    """One CUDA GPU and its memory budget.

    Args:
        index: The GPU in torch's numbering, after ``CUDA_VISIBLE_DEVICES``.
        memory_budget: Bytes the allocator may hold, taken literally: a size such as ``"6GiB"``, or a share of
            the GPU's memory such as ``"80%"``. None for the free memory less a headroom.

    Raises:
        InputError: There is no such GPU, torch cannot use it or count its memory, or the budget is no size or
            exceeds its memory.
        DoesNotFitError: No memory is left for a context, or after the headroom.

    Note:
        The budget leaves out the driver's share, the CUDA context and what libraries allocate past torch
        (NCCL). The headroom is for them.
    """

    kind = "cuda"
    gains_from_compile = True
    optimizer_implementations = ("default", "fused")  # the default is ``foreach``
    compute_capability: tuple[int, int]

    def __init__(self, *, index: int, memory_budget: str | int | None) -> None:
        _require_usable(index)
        gpu = torch.cuda.get_device_properties(index)
        self._index, self._uuid = index, str(gpu.uuid)
        before = host.read_gpu(self._uuid)
        try:
            torch.cuda.synchronize(index)
            self._falls = TAKES_LOWEST and segments_fall(index)
        except RuntimeError as error:
            raise (DoesNotFitError if is_oom(error) else InputError)(
                f"cuda:{index} cannot be opened: {first_line(error)}; look at its processes, its state and "
                "its compute mode with nvidia-smi, or choose another GPU with --device cuda:N"
            ) from error
        after = host.read_gpu(self._uuid)
        self.torch_device = torch.device("cuda", index)
        self.compute_capability = (gpu.major, gpu.minor)
        self._context_bytes = max(0, _used(after) - _used(before))
        """Memory of the CUDA context; 0 if it was there before, or if unknown."""
        notes = [f"no figures from NVML: {after}"] if isinstance(after, str) else []
        self._unmodelled = unmodelled_options(os.environ)
        if self._unmodelled:
            notes.append(f"{', '.join(self._unmodelled)} of the allocator: predictions come from peaks alone")
        free_bytes, held_bytes = torch.cuda.mem_get_info(index)[0], torch.cuda.memory_reserved(index)
        self._available_bytes = min(free_bytes + held_bytes, gpu.total_memory)
        budget = resolve_budget(
            memory_budget,
            total_bytes=gpu.total_memory,
            available=[(free_bytes, "free (the CUDA driver)"), (held_bytes, "held by this process")],
            headroom_share=GPU_HEADROOM_SHARE,
            owner="the GPU",
        )
        super().__init__(budget, name=gpu.name, total_bytes=gpu.total_memory, notes=notes)

    @property
    def new_allocator(self) -> NewAllocator:
        """A function that models torch's allocator in a session that begins now."""
        return partial(
            CachingAllocator,
            expandable="expandable_segments:true" in allocator_options(os.environ),
            falls=self._falls,
            held_bytes=torch.cuda.memory_allocated(self._index),
        )

    def native_precisions(self) -> tuple[Precision, ...]:
        """Return what the tensor cores compute in: bf16 from 8.0 on, fp16 from 7.0 on."""
        if self.compute_capability >= (8, 0):
            return ("bf16", "fp32")
        return ("fp32", "fp16") if self.compute_capability >= (7, 0) else ("fp32",)

    def describe(self) -> DeviceRecord:
        """Read the driver anew and return name, total, budget and the other processes that hold memory."""
        record, gpu = super().describe(), host.read_gpu(self._uuid)
        if isinstance(gpu, str) or gpu.used_bytes is None:
            return record
        # In a container NVML lists this process by an id of the host, or not at all.
        listed = sum(holder.used_bytes or 0 for holder in gpu.holders if holder.pid == os.getpid())
        own_bytes = max(listed, torch.cuda.memory_reserved(self._index) + self._context_bytes)
        return msgspec.structs.replace(
            record,
            other_processes_bytes=max(0, gpu.used_bytes - own_bytes),
            holders=[holder for holder in gpu.holders if holder.pid != os.getpid()],
        )

    @contextmanager
    def session(self, *, is_probe: bool) -> Iterator[CudaMeter]:
        """Cap the allocator at the budget within the block."""
        if is_probe:
            # Workspaces of cuBLAS become cached blocks when they are freed, so this comes before the release.
            free_workspaces()
            self.release()
        records = is_probe and not self._unmodelled
        before = torch.cuda.get_per_process_memory_fraction(self._index)
        try:
            self._cap(self.budget_bytes)
            if records:
                # Without stacks, which cost more than the events.
                torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=MOST_EVENTS)
            # Code of the user and Triton's kernels run on the current GPU, and events record its stream.
            with torch.cuda.device(self._index):
                yield CudaMeter(self._index, waits=is_probe, records=records)
        finally:
            with suppress(torch.AcceleratorError):  # a lost context has raised its error already
                if records:
                    torch.cuda.memory._record_memory_history(enabled=None)
                self._cap(round(before * self._total_bytes))
        if is_probe:
            free_workspaces()

    def budgeted(self, budget_bytes: int) -> CudaDevice:
        """Return the same GPU with the budget of a probe, or with as much of it as is free.

        Free memory fluctuates, and an answer may need its budget to the byte. So the headroom makes up for
        what is no longer free.
        """
        return super().budgeted(min(budget_bytes, max(self.budget_bytes, self._available_bytes)))

    def refuses(self, stats: MemoryStats) -> str | None:
        """Return the rule that a finished step broke, in words; None if none.

        After a retry, memory was found only by returning the cache to the driver. Every later step would do
        the same, and take several times as long.
        """
        if stats.retries:
            return f"the allocator freed its cache {stats.retries} times to find memory"
        if stats.peak_reserved_bytes is not None and stats.peak_reserved_bytes > self.budget_bytes:
            return (
                f"the allocator held {format_bytes(stats.peak_reserved_bytes)}, over the budget of "
                f"{format_bytes(self.budget_bytes)}"
            )
        return None

    def release(self) -> None:
        """Return cached segments to the driver; call it outside of any ``except`` block."""
        super().release()
        with suppress(torch.AcceleratorError):  # a lost context has raised its error already
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Wait until the GPU has finished its work."""
        torch.cuda.synchronize(self._index)

    def _cap(self, limit_bytes: int) -> None:
        """Cap the allocator at the smallest fraction of the memory that allows so many bytes."""
        fraction = fraction_of(limit_bytes, self._total_bytes)
        torch.cuda.set_per_process_memory_fraction(fraction, self._index)


def _require_usable(index: int) -> None:
    """Check that torch finds a GPU, and that its allocator counts and limits the memory there."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not 0 <= index < count:
        raise InputError(
            f"there is no cuda:{index}: CUDA GPUs that torch {torch.__version__} finds: {count}. Run "
            "`autobatch doctor` to see why, or train a Workload with --device cpu"
        )
    backend = torch.cuda.get_allocator_backend()
    if UNCACHED in os.environ or backend not in ("native", "cudaMallocAsync"):
        raise InputError(
            f"torch's allocator for GPUs was replaced ({backend}) or switched off ({UNCACHED}), so that no "
            "budget can be kept: unset the variable, and do not call "
            "torch.cuda.memory.change_current_allocator"
        )


def _used(gpu: host.NvmlGpu | str) -> int:
    return 0 if isinstance(gpu, str) else gpu.used_bytes or 0
