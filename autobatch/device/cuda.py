"""A CUDA GPU as a device: its budget is what the driver has free, and torch's allocator enforces it.

Importing this module touches no GPU. `CudaDevice` creates the CUDA context when it is built, so that free
memory is read after the context has taken its share. The cap (``set_per_process_memory_fraction``) limits
reserved bytes. A step that exceeds it raises ``torch.OutOfMemoryError`` even if the GPU has memory left, so a
probe cannot hurt other processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, Self

import msgspec
import torch

from autobatch.core.records import DeviceRecord
from autobatch.core.units import format_bytes
from autobatch.device import cuda_allocator, nvml, private
from autobatch.device.allocator.caching import AllocatorConfig
from autobatch.device.base import GPU_HEADROOM_SHARE, Device, resolve_budget
from autobatch.device.cuda_allocator import CudaMeter
from autobatch.device.cuda_gpus import open_context, require_usable
from autobatch.device.host import compiler_missing_on_gpu
from autobatch.device.oom import lost_context_ignored

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
    compute_capability: tuple[int, int]

    def __init__(self, *, index: int, memory_budget: str | int | None) -> None:
        require_usable(index, os.environ)
        is_first = not torch.cuda.is_initialized()  # type: ignore[no-untyped-call, unused-ignore]
        gpu = torch.cuda.get_device_properties(index)
        self._index = index
        self._uuid = str(getattr(gpu, "uuid", ""))
        self._held_bytes: int | None = None
        """What the process held when the session began; None outside of sessions."""
        self.torch_device = torch.device("cuda", index)
        self.compute_capability = (gpu.major, gpu.minor)
        before = nvml.read_gpu(self._uuid)
        open_context(index)
        after = nvml.read_gpu(self._uuid)
        self._own = _Own.since(before, after) if is_first else _Own(os.getpid(), 0)
        free_bytes, source, notes = torch.cuda.mem_get_info(index)[0], "the CUDA driver", list[str]()
        if isinstance(after, nvml.NvmlAbsent):
            notes.append(f"no figures from NVML: {after.reason}")
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
        held_bytes = self._held_bytes
        return AllocatorConfig(
            expandable_segments="expandable_segments:true" in cuda_allocator.allocator_options(os.environ),
            falls=None,
            held_bytes=torch.cuda.memory_allocated(self._index) if held_bytes is None else held_bytes,
            retries=False,
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
        record, gpu = super().describe(), nvml.read_gpu(self._uuid)
        if isinstance(gpu, nvml.NvmlAbsent) or gpu.used_bytes is None:
            return record
        reserved_bytes, notes = torch.cuda.memory_reserved(self._index), record.notes
        own_bytes = next((holder.used_bytes for holder in gpu.holders if holder.pid == self._own.pid), None)
        # The id may be that of another process of the host, which holds less.
        if own_bytes is None or own_bytes < reserved_bytes:
            own_bytes = reserved_bytes + self._own.context_bytes
            notes = [*notes, "memory of other processes includes the CUDA libraries of this process"]
        return msgspec.structs.replace(
            record,
            other_processes_bytes=max(0, gpu.used_bytes - own_bytes),
            holders=[holder for holder in gpu.holders if holder.pid != self._own.pid],
            notes=notes,
        )

    @contextmanager
    def enforced(self) -> Iterator[CudaMeter]:
        """Cap the allocator at the budget within the block, which starts with an empty cache."""
        # Workspaces of cuBLAS become cached blocks when they are freed, so this comes before the release.
        cuda_allocator.free_workspaces()
        self.release()
        recording = nullcontext(enter_result=False) if self._unmodelled else private.recording()
        with self._session(), recording as records:
            yield CudaMeter(self._index, waits=True, records=records)
        cuda_allocator.free_workspaces()

    @contextmanager
    def training(self) -> Iterator[CudaMeter]:
        """Cap the allocator at the budget within the block, and keep its cache."""
        with self._session():
            yield CudaMeter(self._index)

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
        try:
            # Code of the user and Triton's kernels run on the current GPU, and events record its stream.
            with torch.cuda.device(self._index), cap:
                yield
        finally:
            self._held_bytes = before


class _Own(NamedTuple):
    """This process as NVML lists it."""

    pid: int | None
    """In a container an id of the host; None if unknown."""
    context_bytes: int
    """Memory of its CUDA context, for when NVML does not list the process."""

    @classmethod
    def since(cls, before: nvml.NvmlGpu | nvml.NvmlAbsent, after: nvml.NvmlGpu | nvml.NvmlAbsent) -> Self:
        """Compare readings before and after the process made its context: it is the one that is new."""
        if isinstance(before, nvml.NvmlAbsent) or isinstance(after, nvml.NvmlAbsent):
            return cls(None, 0)
        new = {holder.pid for holder in after.holders} - {holder.pid for holder in before.holders}
        pid = os.getpid() if os.getpid() in new else new.pop() if len(new) == 1 else None
        return cls(pid, max(0, (after.used_bytes or 0) - (before.used_bytes or 0)))
