"""A CUDA GPU as a device: its budget comes from NVML, and its caching allocator enforces and reports it.

Importing this module touches no GPU. `CudaDevice` creates the CUDA context when it is built, so that free
memory is read after the context has taken its share. The cap (``set_per_process_memory_fraction``) limits
reserved bytes. A step that exceeds it raises ``torch.OutOfMemoryError`` even if the GPU has memory left, so a
probe cannot hurt other processes.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
from typing import TYPE_CHECKING

import torch

from autobatch.core.records import DeviceRecord, MemoryHolder
from autobatch.device import cuda_allocator, nvml
from autobatch.device.allocator.caching import AllocatorConfig, CachingAllocator
from autobatch.device.base import GPU_HEADROOM_SHARE, Device, resolve_budget
from autobatch.device.cuda_allocator import CudaMeter, recorded, why_refused
from autobatch.device.cuda_gpus import (
    bytes_of_process,
    context_growth,
    open_context,
    others_bytes,
    read_free,
    read_nvml,
    require_counted,
    require_gpu,
    require_kernels,
)
from autobatch.device.host import compiler_missing_on_gpu, is_wsl
from autobatch.device.oom import lost_context_ignored
from autobatch.device.profiles import Libraries, Processors

if TYPE_CHECKING:
    from collections.abc import Iterator

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

    def __init__(self, *, index: int, memory_budget: str | int | None) -> None:
        require_gpu(index)
        require_counted(os.environ)
        is_first = not torch.cuda.is_initialized()  # type: ignore[no-untyped-call, unused-ignore]
        self._index = index
        self._expandable = False
        """True if its sessions switch the allocator to expandable segments."""
        self._held_bytes: int | None = None
        """What the process held when the session began; None outside of sessions."""
        self._properties = torch.cuda.get_device_properties(index)
        self._uuid = str(getattr(self._properties, "uuid", "")) or None
        require_kernels(index, self.compute_capability)
        before = read_nvml(self._uuid)
        open_context(index, before)
        after = read_nvml(self._uuid)
        self._context_bytes = context_growth(before, after) if is_first else None
        self._loaded_bytes: int | None = None
        """Taken by the kernels and libraries that the first session loaded; None before it."""
        free_bytes, source, self._notes = read_free(index, self._properties, after)
        options = cuda_allocator.unmodelled_options(os.environ)
        if options:
            self._notes.append(f"{', '.join(options)} of the allocator: predictions come from peaks alone")
        held_bytes = torch.cuda.memory_reserved(index)
        cap_bytes = cuda_allocator.read_cap(index, self._properties.total_memory)
        if cap_bytes - held_bytes < free_bytes and cap_bytes < self._properties.total_memory:
            free_bytes, source = max(0, cap_bytes - held_bytes), "set_per_process_memory_fraction"
        self._available_bytes = min(free_bytes + held_bytes, self._properties.total_memory)
        budget_bytes, budget_source = resolve_budget(
            memory_budget,
            total_bytes=self._properties.total_memory,
            available=[
                (free_bytes, f"free ({source})"),
                (held_bytes, "held by this process"),
            ],
            headroom_share=GPU_HEADROOM_SHARE,
            owner="the GPU",
        )
        super().__init__(budget_bytes, budget_source)

    @property
    def torch_device(self) -> torch.device:
        """``cuda:N``."""
        return torch.device("cuda", self._index)

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Major and minor."""
        return self._properties.major, self._properties.minor

    @property
    def allocator_config(self) -> AllocatorConfig:
        """Settings of torch's allocator in a session, in which a step that needed a retry does not fit."""
        expandable = self._expandable or cuda_allocator.asks_for_expandable(os.environ)
        held_bytes = self._held_bytes
        if held_bytes is None:
            held_bytes = torch.cuda.memory_allocated(self._index)
        return AllocatorConfig(
            expandable_segments=expandable, falls=None, held_bytes=held_bytes, retries=False
        )

    @property
    def libraries(self) -> Libraries:
        """Memory of the libraries and the kernels of the GPU."""
        gpu = self._properties
        return Libraries(
            cuda_allocator.usual_workspaces(self.compute_capability),
            Processors(gpu.multi_processor_count, gpu.max_threads_per_multi_processor),
        )

    @property
    def may_spill(self) -> bool:
        """True on Windows, whose driver does, and if the GPU has no memory of its own."""
        return sys.platform == "win32" or is_wsl() or bool(self._properties.is_integrated)

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
        gpu = read_nvml(self._uuid)
        notes = list(self._notes)
        others = None
        holders: list[MemoryHolder] = []
        if isinstance(gpu, nvml.NvmlGpu) and not self._properties.is_integrated:
            found = nvml.read_holders(gpu.uuid)
            listed = [] if isinstance(found, nvml.NvmlAbsent) else found
            holders = [holder for holder in listed if holder.pid != os.getpid()]
            reserved_bytes = torch.cuda.memory_reserved(self._index)
            own_bytes = bytes_of_process(listed, os.getpid(), least_bytes=reserved_bytes)
            unlisted_bytes = reserved_bytes + (self._context_bytes or 0) + (self._loaded_bytes or 0)
            others = others_bytes(gpu, held_bytes=unlisted_bytes if own_bytes is None else own_bytes)
            if others is not None and own_bytes is None and self._context_bytes is None:
                notes.append("memory of other processes includes the CUDA context of this process")
        return DeviceRecord(
            kind=self.kind,
            name=self._properties.name,
            total_bytes=self._properties.total_memory,
            budget_bytes=self._budget_bytes,
            budget_source=self._budget_source,
            other_processes_bytes=others,
            holders=holders,
            notes=notes,
        )

    @contextlib.contextmanager
    def enforced(self) -> Iterator[CudaMeter]:
        """Cap the allocator at the budget within the block, which starts with an empty cache."""
        # Workspaces of cuBLAS become cached blocks when they are freed, so this comes before the release.
        cuda_allocator.free_workspaces()
        cuda_allocator.free_pinned()
        self.release()
        is_modelled = not cuda_allocator.unmodelled_options(os.environ)
        with (
            self._session(),
            recorded(self._index, is_modelled=is_modelled) as history,
            self._libraries_counted(),
        ):
            yield CudaMeter(self._index, history)
        cuda_allocator.free_workspaces()

    @contextlib.contextmanager
    def training(self) -> Iterator[CudaMeter]:
        """Cap the allocator at the budget within the block, and keep its cache."""
        with self._session():
            yield CudaMeter(self._index)

    def new_allocator(self) -> CachingAllocator:
        """Return an empty model of torch's allocator, limited to the budget."""
        return CachingAllocator(self._budget_bytes, self.allocator_config)

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
        other = copy.copy(self)
        other._budget_bytes = min(budget_bytes, max(self._budget_bytes, self._available_bytes))
        return other

    def refuses(self, stats: MemoryStats) -> str | None:
        """Return why a step that ran does not count as fitting; None if it fits."""
        return why_refused(stats, self._budget_bytes)

    def release(self) -> None:
        """Return cached segments to the driver; call it outside of any ``except`` block."""
        super().release()
        with lost_context_ignored():
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Wait until the GPU has finished its work."""
        torch.cuda.synchronize(self._index)

    @contextlib.contextmanager
    def _session(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, self, "_held_bytes", self._held_bytes)
            self._held_bytes = torch.cuda.memory_allocated(self._index)
            total_bytes = self._properties.total_memory
            # Code of the user and Triton's kernels run on the current GPU, and events record its stream.
            stack.enter_context(torch.cuda.device(self._index))
            stack.enter_context(
                cuda_allocator.capped(self._index, limit_bytes=self._budget_bytes, total_bytes=total_bytes)
            )
            if self._expandable:
                stack.enter_context(cuda_allocator.expandable_segments(self.release))
            yield

    @contextlib.contextmanager
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
            after = self._bytes_outside()
            self._loaded_bytes = 0 if before is None or after is None else max(0, after - before)

    def _bytes_outside(self) -> int | None:
        """Return the bytes that any process holds outside of this process's allocator; None if unknown."""
        gpu = read_nvml(self._uuid)
        if not isinstance(gpu, nvml.NvmlGpu):
            return None
        return others_bytes(gpu, held_bytes=torch.cuda.memory_reserved(self._index))
