"""A CUDA GPU as a device: its budget comes from NVML, and its caching allocator enforces and reports it.

Importing this module touches no GPU. `CudaDevice` creates the CUDA context when it is built, so that free
memory is read after the context has taken its share. The cap (``set_per_process_memory_fraction``) limits
reserved bytes. A step that exceeds it raises ``torch.OutOfMemoryError`` even if the GPU has memory left, so a
probe cannot hurt other processes.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import msgspec
import torch

from autobatch.core.errors import InputError
from autobatch.core.records import DeviceRecord
from autobatch.core.units import format_bytes
from autobatch.device import cuda_allocator, nvml
from autobatch.device.allocator.caching import AllocatorConfig
from autobatch.device.base import GPU_HEADROOM_SHARE, Device, resolve_budget
from autobatch.device.cuda_allocator import CudaMeter
from autobatch.device.cuda_gpus import (
    growth,
    lacking_kernels,
    open_context,
    read_free,
    read_nvml,
    require_usable,
    used_bytes,
)
from autobatch.device.host import compiler_missing_on_gpu, is_wsl
from autobatch.device.oom import lost_context_ignored
from autobatch.device.profiles import Libraries, Processors

if TYPE_CHECKING:
    from autobatch.core.records import Precision
    from autobatch.device.allocator.ledger import MemoryStats


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
    reads_pinned_memory = True
    compute_capability: tuple[int, int]

    def __init__(self, *, index: int, memory_budget: str | int | None) -> None:
        require_usable(index, os.environ)
        is_first = not torch.cuda.is_initialized()  # type: ignore[no-untyped-call, unused-ignore]
        gpu = torch.cuda.get_device_properties(index)
        self._index = index
        self._uuid = str(getattr(gpu, "uuid", "")) or None
        self._is_integrated = bool(gpu.is_integrated)
        self._expandable = False
        """True if its sessions switch the allocator to expandable segments."""
        self._held_bytes: int | None = None
        """What the process held when the session began; None outside of sessions."""
        self._loaded_bytes: int | None = None
        """Taken by the kernels and libraries that the first session loaded; None before it."""
        self.torch_device = torch.device("cuda", index)
        self.compute_capability = (gpu.major, gpu.minor)
        self.libraries = Libraries(
            cuda_allocator.usual_workspaces(self.compute_capability),
            Processors(gpu.multi_processor_count, gpu.max_threads_per_multi_processor),
        )
        # The driver of Windows spills, and a GPU without memory of its own shares the host's.
        self.may_spill = sys.platform == "win32" or is_wsl() or self._is_integrated
        lacking = lacking_kernels(index, self.compute_capability)
        if lacking is not None:
            raise InputError(f"{lacking}, or use --device cpu")

        before = read_nvml(self._uuid)
        open_context(index, before)
        after = read_nvml(self._uuid)
        self._context_bytes = growth(used_bytes(before), used_bytes(after)) if is_first else 0
        """Taken by the CUDA context; 0 if it was there before."""
        free_bytes, source, notes = read_free(index, gpu, after)
        self._unmodelled = cuda_allocator.unmodelled_options(os.environ)
        if self._unmodelled:
            notes.append(f"{', '.join(self._unmodelled)} of the allocator: predictions come from peaks alone")
        held_bytes = torch.cuda.memory_reserved(index)
        cap_bytes = cuda_allocator.read_cap(index, gpu.total_memory)
        if cap_bytes - held_bytes < free_bytes and cap_bytes < gpu.total_memory:
            free_bytes, source = max(0, cap_bytes - held_bytes), "set_per_process_memory_fraction"
        self._available_bytes = min(free_bytes + held_bytes, gpu.total_memory)
        budget = resolve_budget(
            memory_budget,
            total_bytes=gpu.total_memory,
            available=[(free_bytes, f"free ({source})"), (held_bytes, "held by this process")],
            headroom_share=GPU_HEADROOM_SHARE,
            owner="the GPU",
        )
        super().__init__(budget, name=gpu.name, total_bytes=gpu.total_memory, notes=notes)

    @property
    def allocator_config(self) -> AllocatorConfig:
        """Settings of torch's allocator in a session, in which a step that needed a retry does not fit."""
        asked = "expandable_segments:true" in cuda_allocator.allocator_options(os.environ)
        held_bytes = self._held_bytes
        if held_bytes is None:
            held_bytes = torch.cuda.memory_allocated(self._index)
        return AllocatorConfig(
            expandable_segments=asked or self._expandable, falls=None, held_bytes=held_bytes, retries=False
        )

    def native_precisions(self) -> tuple[Precision, ...]:
        """Return what the tensor cores compute in: bf16 from 8.0 on, fp16 from 7.0 on."""
        if self.compute_capability >= (8, 0):
            return ("bf16", "fp32")
        return ("fp32", "fp16") if self.compute_capability >= (7, 0) else ("fp32",)

    def optimizer_implementations(self) -> tuple[str, ...]:
        """Return ``default`` and ``fused``: the default is ``foreach`` on a GPU."""
        return ("default", "fused")

    def compiler_missing(self) -> str | None:
        """Return what `autobatch.device.host.compiler_missing_on_gpu` finds."""
        return compiler_missing_on_gpu(self.compute_capability)

    def describe(self) -> DeviceRecord:
        """Read the driver anew and return name, total, budget and the other processes that hold memory."""
        record, gpu = super().describe(), read_nvml(self._uuid)
        used = used_bytes(gpu)
        if isinstance(gpu, nvml.NvmlAbsent) or self._is_integrated:
            return record
        found = nvml.read_holders(gpu.uuid)
        listed = [] if isinstance(found, nvml.NvmlAbsent) else found
        reserved_bytes = torch.cuda.memory_reserved(self._index)
        own_bytes, notes = reserved_bytes + self._context_bytes + (self._loaded_bytes or 0), record.notes
        own = [one.used_bytes for one in listed if one.pid == os.getpid() and one.used_bytes is not None]
        # In a container its id may be that of another process of the host, which holds less.
        if own and own[0] >= reserved_bytes:
            own_bytes = own[0]
        elif used is not None and not self._context_bytes:
            notes = [*notes, "memory of other processes includes the CUDA context of this process"]
        return msgspec.structs.replace(
            record,
            other_processes_bytes=None if used is None else max(0, used - own_bytes),
            holders=[one for one in listed if one.pid != os.getpid()],
            notes=notes,
        )

    @contextmanager
    def enforced(self) -> Iterator[CudaMeter]:
        """Cap the allocator at the budget within the block, which starts with an empty cache."""
        # Workspaces of cuBLAS become cached blocks when they are freed, so this comes before the release.
        cuda_allocator.free_workspaces()
        self.release()
        recording = nullcontext(enter_result=False) if self._unmodelled else cuda_allocator.recorded()
        with self._session(), recording as records, self._libraries_counted():
            yield CudaMeter(self._index, waits=True, records=records)
        cuda_allocator.free_workspaces()

    @contextmanager
    def training(self) -> Iterator[CudaMeter]:
        """Cap the allocator at the budget within the block, and keep its cache."""
        with self._session():
            yield CudaMeter(self._index)

    def why_not_expandable(self) -> str | None:
        """Return why the allocator cannot switch to expandable segments while it runs; None if it can."""
        return "segments are expandable already" if self._expandable else cuda_allocator.why_not_expandable()

    def expandable(self) -> CudaDevice:
        """Return the same GPU, with expandable segments in its sessions."""
        other = copy.copy(self)
        other._expandable = True
        return other

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
        with lost_context_ignored():
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Wait until the GPU has finished its work."""
        torch.cuda.synchronize(self._index)

    @contextmanager
    def _session(self) -> Iterator[None]:
        before, self._held_bytes = self._held_bytes, torch.cuda.memory_allocated(self._index)
        cap = cuda_allocator.capped(self._index, limit_bytes=self.budget_bytes, total_bytes=self._total_bytes)
        segments = cuda_allocator.expandable_segments(self.release) if self._expandable else nullcontext()
        try:
            # Code of the user and Triton's kernels run on the current GPU, and events record its stream.
            with torch.cuda.device(self._index), cap, segments:
                yield
        finally:
            self._held_bytes = before

    @contextmanager
    def _libraries_counted(self) -> Iterator[None]:
        """Count what the first session takes outside of the allocator as memory of this process.

        CUDA loads kernels and libraries when they are first used: some 100 MiB after the context was made.
        """
        if self._loaded_bytes is not None:
            yield
            return
        before = self._bytes_outside()
        try:
            yield
        finally:
            self._loaded_bytes = growth(before, self._bytes_outside())

    def _bytes_outside(self) -> int | None:
        """Return the bytes that any process holds outside of this process's allocator; None if unknown."""
        used = used_bytes(read_nvml(self._uuid))
        return None if used is None else used - torch.cuda.memory_reserved(self._index)
