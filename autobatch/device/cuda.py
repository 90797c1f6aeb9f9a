"""A CUDA card: its budget from NVML, enforced by the caching allocator's own cap, read from its statistics.

Importing this module touches no card. `CudaDevice` makes the CUDA context when it is built, so that what is
free is read after the context has taken its share. The cap (``set_per_process_memory_fraction``) is held
against reserved bytes and answers a step that outgrows it with ``torch.OutOfMemoryError``, however much the
card has left: a probe cannot hurt a neighbour. The arithmetic stands in pure functions.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib.util
import math
import os
import sys
from typing import TYPE_CHECKING

import torch

from autobatch.core.errors import InputError
from autobatch.core.records import DeviceRecord, MemoryHolder, Record
from autobatch.core.units import format_bytes
from autobatch.device import nvml
from autobatch.device.allocator.caching import AllocatorConfig, CachingAllocator
from autobatch.device.allocator.ledger import MemoryStats
from autobatch.device.budget import GPU_HEADROOM_SHARE, resolve_budget
from autobatch.device.cuda_history import History, recorded
from autobatch.device.host import host_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from autobatch.core.records import Precision
    from autobatch.device.allocator.trace import Trace


class VisibleGpu(Record, frozen=True, kw_only=True):
    """A card that torch can use, for people."""

    index: int
    """As in ``cuda:N``."""
    name: str
    uuid: str | None
    total_bytes: int
    free_bytes: int | None
    capability: str
    """Compute capability, such as ``9.0``."""


class CudaMeter:
    """Readings of one session on a card: peaks and retries count from when the session began.

    Args:
        index: the card.
        history: what its allocator is noting; ``None`` in training, which then waits for no reading either.
    """

    def __init__(self, index: int, history: History | None = None) -> None:
        self._history = history
        self.phase = "setup"
        """What `mark` said last."""
        self._index = index
        torch.cuda.reset_peak_memory_stats(index)
        self._retries_before = self._retries()

    def count(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do nothing: the batch really lies on the card, and its allocator has counted it."""

    def uncounted(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing: what is joined on the host is not on the card."""
        return contextlib.nullcontext()

    def mark(self, phase: str) -> None:
        """Say what comes next; see `autobatch.step.train_step.Mark`."""
        self.phase = phase

    def stats(self) -> MemoryStats:
        """Read the allocator, in bytes; in a probe, waits for the card first."""
        if self._history is not None:
            torch.cuda.synchronize(self._index)
        figures = torch.cuda.memory_stats(self._index)
        return MemoryStats(
            allocated_bytes=figures["allocated_bytes.all.current"],
            reserved_bytes=figures["reserved_bytes.all.current"],
            peak_allocated_bytes=figures["allocated_bytes.all.peak"],
            peak_reserved_bytes=figures["reserved_bytes.all.peak"],
            retries=self._retries() - self._retries_before,
        )

    def trace(self) -> Trace | None:
        """The events that the allocator noted; ``None`` in training, which is not slowed down by them."""
        return None if self._history is None else self._history.trace()

    def _retries(self) -> int:
        return int(torch.cuda.memory_stats(self._index)["num_alloc_retries"])


class CudaDevice:
    """One CUDA card and what may be spent on it.

    Args:
        index: The card as torch numbers it, after ``CUDA_VISIBLE_DEVICES``.
        memory_budget: Bytes the allocator may hold, taken at its word: a size such as ``"6GiB"`` or a share
            of the card such as ``"80%"``. ``None``: what is free, less a headroom.

    Raises:
        InputError: there is no such card, or the budget is no size or over the card's memory.
        DoesNotFitError: the card has less free than the headroom.

    Note:
        The driver's share, the CUDA context and what libraries allocate past torch (NCCL) are not in the
        budget; the headroom is for them.
    """

    def __init__(self, *, index: int, memory_budget: str | int | None) -> None:
        _require_gpu(index)
        first = not torch.cuda.is_initialized()  # type: ignore[no-untyped-call, unused-ignore]
        self._index = index
        self._expandable = False
        """Whether its sessions tell the allocator to use expandable segments."""
        self._properties = torch.cuda.get_device_properties(index)
        self._uuid = str(getattr(self._properties, "uuid", "")) or None
        before = _nvml_gpu(self._uuid)
        torch.cuda.synchronize(index)  # makes the context
        after = _nvml_gpu(self._uuid)
        self._context_bytes = _growth(before, after) if first else None
        free_bytes, source, self._notes = self._free(after)
        self._budget_bytes, self._budget_source = resolve_budget(
            memory_budget,
            total_bytes=self._properties.total_memory,
            available=[
                (free_bytes, f"free ({source})"),
                (torch.cuda.memory_reserved(index), "held by this process"),
            ],
            headroom_share=GPU_HEADROOM_SHARE,
            owner="the GPU",
        )

    @property
    def kind(self) -> str:
        """``cuda``."""
        return "cuda"

    @property
    def torch_device(self) -> torch.device:
        """``cuda:N``."""
        return torch.device("cuda", self._index)

    @property
    def budget_bytes(self) -> int:
        """What the allocator may hold: reserved bytes, cached blocks included."""
        return self._budget_bytes

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Major and minor."""
        return self._properties.major, self._properties.minor

    @property
    def allocator_config(self) -> AllocatorConfig:
        """Settings of torch's allocator in a session."""
        expandable = self._expandable or asks_for_expandable(os.environ)
        return AllocatorConfig(expandable_segments=expandable)

    @property
    def is_traceable(self) -> bool:
        """False: libraries take workspaces that no trace sees, so the first runs tell more."""
        return False

    @property
    def may_spill(self) -> bool:
        """True: some drivers do."""
        return True

    @property
    def reads_pinned_memory(self) -> bool:
        """True."""
        return True

    @property
    def gains_from_compile(self) -> bool:
        """True."""
        return True

    def default_precision(self) -> Precision:
        """Return bf16 on GPUs built for it (8.0 and later), else fp32."""
        return "bf16" if self.compute_capability >= (8, 0) else "fp32"

    def native_precisions(self) -> tuple[Precision, ...]:
        """Return what the tensor cores compute in: bf16 from 8.0 on, fp16 from 7.0 on."""
        if self.compute_capability >= (8, 0):
            return ("bf16", "fp32")
        return ("fp32", "fp16") if self.compute_capability >= (7, 0) else ("fp32",)

    def optimizer_implementations(self) -> tuple[str, ...]:
        """Return ``default`` and ``fused``: the default is ``foreach`` on a GPU."""
        return ("default", "fused")

    def compiler_missing(self) -> str | None:
        """Return that triton is missing; None if it is installed."""
        return None if importlib.util.find_spec("triton") else "torch.compile needs triton on a GPU"

    def describe(self) -> DeviceRecord:
        """Name, total, budget and who else holds memory; reads the driver anew."""
        gpu = _nvml_gpu(self._uuid)
        notes = list(self._notes)
        others = None
        holders: list[MemoryHolder] = []
        if isinstance(gpu, nvml.NvmlGpu) and not self._properties.is_integrated:
            held = torch.cuda.memory_reserved(self._index) + (self._context_bytes or 0)
            others = others_bytes(gpu, held_bytes=held)
            found = nvml.read_holders(gpu.uuid)
            if not isinstance(found, nvml.NvmlAbsent):
                holders = [holder for holder in found if holder.pid != os.getpid()]
            if others is not None and self._context_bytes is None:
                notes.append("what other processes hold includes this process's own CUDA context")
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
        """Cap the allocator at the budget, start from nothing cached, and put the former cap back after."""
        self.release()
        with self._capped(), self._segments(), recorded(self._index) as history:
            yield CudaMeter(self._index, history)

    @contextlib.contextmanager
    def training(self) -> Iterator[CudaMeter]:
        """Cap the allocator at the budget, and put the former cap back after; what is cached stays."""
        with self._capped(), self._segments():
            yield CudaMeter(self._index)

    def new_allocator(self) -> CachingAllocator:
        """An empty model of the card's allocator with the budget, to replay in."""
        return CachingAllocator(self._budget_bytes, self.allocator_config)

    def why_not_expandable(self) -> str | None:
        """Why the allocator cannot be told while it runs to use expandable segments; ``None``: it can."""
        if self._expandable:
            return "segments are expandable already"
        read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
        return why_not_expandable(
            os.environ,
            platform=sys.platform if torch.version.hip is None else "HIP",
            backend=torch.cuda.get_allocator_backend(),
            can_be_told=_allocator_settings() is not None,
            was_told="" if read is None else str(read()),
        )

    def expandable(self) -> CudaDevice:
        """The same card, whose sessions use expandable segments."""
        other = copy.copy(self)
        other._expandable = True
        return other

    def refuses(self, stats: MemoryStats) -> str | None:
        """Why a step that ran does not count as fitting; ``None``: it fits."""
        return why_refused(stats, self._budget_bytes)

    def release(self) -> None:
        """Give cached segments back to the driver; call it outside of any ``except`` block."""
        gc.collect()
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Wait until the card has done what it was given."""
        torch.cuda.synchronize(self._index)

    @contextlib.contextmanager
    def _segments(self) -> Iterator[None]:
        """Inside, new segments are expandable where the device is; what was cached before is given back.

        The allocator reads the setting whenever it asks the driver for more (``alloc_block`` in
        c10/cuda/CUDACachingAllocator.cpp); what it holds already is freed as it was made.
        """
        tell = _allocator_settings()
        if not self._expandable or tell is None:
            yield
            return
        self.release()
        tell("expandable_segments:True")
        try:
            yield
        finally:
            tell("expandable_segments:False")
            self.release()

    @contextlib.contextmanager
    def _capped(self) -> Iterator[None]:
        before = self._capped_at()
        self._cap(self._budget_bytes)
        try:
            yield
        finally:
            self._cap(before)

    def _cap(self, size_bytes: int) -> None:
        fraction = memory_fraction(size_bytes, self._properties.total_memory)
        torch.cuda.set_per_process_memory_fraction(fraction, self._index)

    def _capped_at(self) -> int:
        """Read the cap that stands, in bytes; the whole card (no cap) on releases that cannot say."""
        read = getattr(torch.cuda, "get_per_process_memory_fraction", None)
        fraction = 1.0 if read is None else read(self._index)
        return round(fraction * self._properties.total_memory)

    def _free(self, gpu: nvml.NvmlGpu | nvml.NvmlAbsent) -> tuple[int, str, list[str]]:
        """What is free now, in bytes, who says so, and what a person should know of it."""
        if self._properties.is_integrated:
            # The driver's own figure is the free memory of the host, which counts its page cache as taken.
            host = host_memory()
            if host.available_bytes is not None:
                return host.available_bytes, host.source, ["the card shares the host's memory"]
        if isinstance(gpu, nvml.NvmlGpu) and gpu.free_bytes is not None:
            return gpu.free_bytes, "NVML", []
        reason = gpu.reason if isinstance(gpu, nvml.NvmlAbsent) else "the card does not tell what is free"
        free_bytes, _ = torch.cuda.mem_get_info(self._index)
        return free_bytes, "the CUDA driver", [f"no figures from NVML: {reason}"]


def _allocator_settings() -> Callable[[str], None] | None:
    """What tells torch's allocator how to work while it runs (2.9 and later); ``None``: there is none."""
    return getattr(torch._C, "_accelerator_setAllocatorSettings", None)


def visible_gpus() -> list[VisibleGpu]:
    """List the cards that torch can use, in its order; none where there is no card or no CUDA build."""
    if not torch.cuda.is_available():
        return []
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        uuid = str(getattr(properties, "uuid", "")) or None
        gpu = _nvml_gpu(uuid)
        gpus.append(
            VisibleGpu(
                index=index,
                name=properties.name,
                uuid=uuid,
                total_bytes=properties.total_memory,
                free_bytes=gpu.free_bytes if isinstance(gpu, nvml.NvmlGpu) else None,
                capability=f"{properties.major}.{properties.minor}",
            )
        )
    return gpus


def asks_for_expandable(environ: Mapping[str, str]) -> bool:
    """Whether the allocator was told to use expandable segments; the old variable comes first."""
    text = environ.get("PYTORCH_CUDA_ALLOC_CONF") or environ.get("PYTORCH_ALLOC_CONF") or ""
    return "expandable_segments:true" in text.replace(" ", "").lower()


def why_not_expandable(
    environ: Mapping[str, str], *, platform: str, backend: str, can_be_told: bool, was_told: str
) -> str | None:
    """Why the allocator cannot be told while it runs to use expandable segments; ``None``: it can.

    Args:
        environ: where the user may have told it how to work; that stands.
        platform: the system, or ``HIP``.
        backend: which allocator it is.
        can_be_told: whether this torch has a way to.
        was_told: what it was told since the process began.
    """
    named = [name for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF") if environ.get(name)]
    if named:
        return f"{named[0]} is set, and what it says is followed"
    if platform != "linux" or backend != "native":
        return "only torch's own allocator has them, for CUDA on Linux"
    if not can_be_told:
        return "this torch cannot be told while it runs: set PYTORCH_ALLOC_CONF=expandable_segments:True"
    # What a session of ours leaves behind is torch's default.
    if was_told.strip() not in ("", "expandable_segments:False"):
        return f"something else has told the allocator how to work ({was_told})"
    return None


def memory_fraction(budget_bytes: int, total_bytes: int) -> float:
    """Return the smallest share of the card, at most 1.0, that still allows the whole budget.

    The allocator multiplies and cuts off: one byte lower, a budget of whole segments would lose a segment.
    """
    fraction = min(budget_bytes / total_bytes, 1.0)
    while fraction < 1.0 and int(fraction * total_bytes) < budget_bytes:
        fraction = math.nextafter(fraction, 1.0)
    return fraction


def why_refused(stats: MemoryStats, budget_bytes: int) -> str | None:
    """Say which rule a step broke that ran to its end; ``None``: none.

    A retry means that memory was found only after giving the cache back to the driver: it would be the same
    at every step, at a multiple of the time.
    """
    if stats.retries:
        return f"the allocator gave its cache back {stats.retries} times to find room"
    if stats.peak_reserved_bytes is not None and stats.peak_reserved_bytes > budget_bytes:
        return (
            f"the allocator held {format_bytes(stats.peak_reserved_bytes)}, over the budget of "
            f"{format_bytes(budget_bytes)}"
        )
    return None


def others_bytes(gpu: nvml.NvmlGpu, *, held_bytes: int) -> int | None:
    """Return what other processes hold of a card, in bytes; ``None`` where NVML has no figures.

    Args:
        gpu: The reading; its total less its free counts the driver's own share, which belongs to nobody.
        held_bytes: What this process holds: its allocator's segments and its context.
    """
    if gpu.total_bytes is None or gpu.free_bytes is None:
        return None
    return max(0, gpu.total_bytes - gpu.free_bytes - (gpu.driver_reserved_bytes or 0) - held_bytes)


def _require_gpu(index: int) -> None:
    if not torch.cuda.is_available():
        raise InputError(
            f"cuda:{index} was asked for, and torch {torch.__version__} finds no CUDA card: "
            "see `autobatch doctor`, or use --device cpu"
        )
    count = torch.cuda.device_count()
    if not 0 <= index < count:
        raise InputError(f"cuda:{index} was asked for, and torch finds {count}: cuda:0 to cuda:{count - 1}")


def _nvml_gpu(uuid: str | None) -> nvml.NvmlGpu | nvml.NvmlAbsent:
    """Find a card in NVML by torch's UUID, which lacks the prefix that tells a MIG slice from a card."""
    if uuid is None:
        return nvml.NvmlAbsent(reason="torch does not tell the UUID of the card")
    gpu = nvml.read_gpu(f"MIG-{uuid}")
    if isinstance(gpu, nvml.NvmlAbsent):
        gpu = nvml.read_gpu(f"GPU-{uuid}")
    if isinstance(gpu, nvml.NvmlGpu) and gpu.mig_mode:
        return nvml.NvmlAbsent(reason="the card is cut by MIG, and its figures are not those of the slice")
    return gpu


def _growth(before: nvml.NvmlGpu | nvml.NvmlAbsent, after: nvml.NvmlGpu | nvml.NvmlAbsent) -> int | None:
    """What the context took, in bytes; ``None`` where that cannot be told."""
    if isinstance(before, nvml.NvmlAbsent) or isinstance(after, nvml.NvmlAbsent):
        return None
    if before.free_bytes is None or after.free_bytes is None:
        return None
    return max(0, before.free_bytes - after.free_bytes) or None  # 0: the context was there before
