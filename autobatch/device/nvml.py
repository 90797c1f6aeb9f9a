"""What NVIDIA's driver says of its cards: the only module that imports pynvml (distribution nvidia-ml-py).

Every reading opens NVML, asks, and shuts it down again; nothing is kept. NVML is a help and never needed, so
whatever it fails with becomes an `NvmlAbsent` with one line of reason, and a figure that a card does not give
becomes ``None``. Sizes are bytes. NVML knows nothing of ``CUDA_VISIBLE_DEVICES``: cards are named by UUID,
and `visible_gpus` says which of them CUDA will show, before any CUDA context exists.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import re
from typing import TYPE_CHECKING, Any, TypeVar

from autobatch.core.records import MemoryHolder, Record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


T = TypeVar("T")


_REASONS = {  # by NVML's error number
    3: "the card does not offer this reading (unified memory, or a virtual card)",
    4: "no permission to ask the driver",
    6: "no card of that name here",
    9: "the NVIDIA driver is not loaded",
    12: "the driver's library (libnvidia-ml) was not found: no NVIDIA driver, or a container without it",
    13: "the driver is older than nvidia-ml-py expects",
    15: "a card is lost: it no longer answers on the bus",
    16: "a card needs a reset",
    17: "the operating system blocks the driver's library",
    18: "the driver and its library are of different versions: restart after a driver update",
    999: "unknown error 999: a container may have lost its cards, restart it",
}


_REINSTALL = "pip uninstall pynvml, then pip install --force-reinstall nvidia-ml-py"


_ORDINAL = re.compile(r"[+-]?[0-9]+")


class NvmlGpu(Record, frozen=True, kw_only=True):
    """A card, or a MIG slice of one, as NVML sees it."""

    uuid: str
    """With its prefix: ``GPU-…``, or ``MIG-…`` for a slice."""
    name: str | None
    total_bytes: int | None
    free_bytes: int | None
    """The figure to budget on: releases disagree on whether `used_bytes` counts the driver's own share."""
    used_bytes: int | None
    driver_reserved_bytes: int | None
    pci_bus_id: str | None
    mig_mode: bool | None
    """Whether the card is cut into slices; ``None`` where it cannot be."""
    mig_uuids: list[str]
    driver_version: str | None


class NvmlReading(Record, frozen=True, kw_only=True):
    """All cards that the driver shows to this process, by PCI bus."""

    driver_version: str | None
    gpus: list[NvmlGpu]
    notes: list[str]
    """Cards that did not answer, a line each."""


class NvmlAbsent(Record, frozen=True, kw_only=True):
    """There is no such reading, and that is no error."""

    reason: str


class VisibleGpus(Record, frozen=True, kw_only=True):
    """The cards that CUDA will show, in its order."""

    uuids: list[str] | None
    """``None``: the order cannot be told from here."""
    note: str | None = None


def read_gpus() -> NvmlReading | NvmlAbsent:
    """List the cards with their memory, or say why that cannot be done."""
    return _ask(_read_gpus)


def read_gpu(uuid: str) -> NvmlGpu | NvmlAbsent:
    """Read one card, or one MIG slice, by its UUID with prefix (``GPU-…``, ``MIG-…``)."""
    return _ask(lambda nvml: _gpu(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid)))


def read_holders(uuid: str) -> list[MemoryHolder] | NvmlAbsent:
    """List the processes that hold memory of a card, this one included, the largest first.

    Process ids are the host's, so inside a container they name nobody; use them for people only.
    """
    return _ask(lambda nvml: _holders(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid)))


def visible_gpus(environ: Mapping[str, str], gpus: Sequence[NvmlGpu]) -> VisibleGpus:
    """Resolve ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER`` to UUIDs in the order of CUDA.

    As CUDA reads it: the first entry says whether indices, ``GPU-`` prefixes or ``MIG-`` names are listed;
    the list ends at the first entry that is invalid (``-1``, nonsense, an ambiguous prefix); a card named
    twice empties it.

    Args:
        environ: The environment to read, ``os.environ`` as a rule.
        gpus: All cards of the machine, as `read_gpus` lists them.
    """
    asked = environ.get("CUDA_VISIBLE_DEVICES")
    entries = None if asked is None else [entry.strip() for entry in asked.split(",")]
    if entries and entries[0].startswith("MIG-"):
        slices = [uuid for gpu in gpus for uuid in gpu.mig_uuids]
        return _by_name(entries, "MIG-", slices, known=bool(slices))
    if entries and entries[0].startswith("GPU-"):
        found = _by_name(entries, "GPU-", [gpu.uuid for gpu in gpus], known=True)
    else:
        found = _by_index(entries, environ.get("CUDA_DEVICE_ORDER"), gpus)
    if any(gpu.mig_mode and gpu.uuid in (found.uuids or ()) for gpu in gpus):
        return VisibleGpus(uuids=None, note="a card is cut by MIG: name its slice in CUDA_VISIBLE_DEVICES")
    return found


def _by_name(entries: list[str], prefix: str, known_uuids: list[str], *, known: bool) -> VisibleGpus:
    uuids: list[str] = []
    for entry in entries:
        # Slices may be hidden from NVML by lack of privilege: then the name is taken at its word.
        matches = [uuid for uuid in known_uuids if uuid.startswith(entry)] if known else [entry]
        if not entry.startswith(prefix) or len(matches) != 1:
            break
        uuids += matches
    return _without_repeats(uuids)


def _by_index(entries: list[str] | None, order: str | None, gpus: Sequence[NvmlGpu]) -> VisibleGpus:
    by_bus = [gpu.uuid for gpu in sorted(gpus, key=lambda gpu: gpu.pci_bus_id or "")]
    indices = list(range(len(by_bus))) if entries is None else []
    for entry in entries or ():
        match = _ORDINAL.match(entry)  # as strtoul reads it: "1x" is 1
        if match is None or not 0 <= int(match[0]) < len(by_bus):
            break
        indices.append(int(match[0]))
    alike = len({gpu.name for gpu in gpus}) == 1 and None not in {gpu.name for gpu in gpus}
    if indices and order != "PCI_BUS_ID" and len(gpus) > 1 and not alike:
        return VisibleGpus(
            uuids=None,
            note="CUDA numbers unlike cards by speed: set CUDA_DEVICE_ORDER=PCI_BUS_ID to number them by bus",
        )
    return _without_repeats([by_bus[index] for index in indices])


def _without_repeats(uuids: list[str]) -> VisibleGpus:
    if len(set(uuids)) < len(uuids):
        return VisibleGpus(uuids=[], note="CUDA_VISIBLE_DEVICES names a card twice: CUDA then shows none")
    return VisibleGpus(uuids=uuids)


def _ask(question: Callable[[Any], T]) -> T | NvmlAbsent:
    """Answer a question with NVML open, or say why not; the only place where its errors are caught whole."""
    nvml = _bindings()
    if isinstance(nvml, NvmlAbsent):
        return nvml
    try:
        nvml.nvmlInit()
        try:
            return question(nvml)
        finally:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlShutdown()
    except _failures(nvml) as error:
        return NvmlAbsent(reason=_reason(error))


def _bindings() -> Any:
    """Import pynvml, or an `NvmlAbsent` that says what to install or uninstall."""
    try:
        nvml = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        return NvmlAbsent(reason="nvidia-ml-py is not installed: pip install nvidia-ml-py")
    except Exception as error:  # a foreign or broken module of that name may raise anything
        return NvmlAbsent(reason=f"pynvml cannot be imported ({type(error).__name__}): {_REINSTALL}")
    if hasattr(nvml, "__path__") and _is_installed("pynvml"):
        return NvmlAbsent(reason=f"the deprecated distribution pynvml hides nvidia-ml-py: {_REINSTALL}")
    if not all(hasattr(nvml, name) for name in ("nvmlInit", "NVMLError", "NVMLLibraryMismatchError")):
        return NvmlAbsent(reason=f"the module pynvml is not the one of nvidia-ml-py: {_REINSTALL}")
    return nvml


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _failures(nvml: Any) -> tuple[type[Exception], ...]:
    # UnicodeDecodeError: names that are no UTF-8 do occur.
    return (nvml.NVMLError, nvml.NVMLLibraryMismatchError, OSError, UnicodeDecodeError)


def _reason(error: Exception) -> str:
    code = getattr(error, "value", None)
    if code in _REASONS:
        return _REASONS[code]
    if type(error).__name__ == "NVMLLibraryMismatchError":
        return _REASONS[13]
    text = " ".join(str(error).split())
    return f"NVML error {code}: {text}" if code is not None else f"{type(error).__name__}: {text}"


def _optional(nvml: Any, function: str, *args: Any) -> Any:
    """Call one NVML function; ``None`` where it has no answer."""
    call = getattr(nvml, function, None)  # bindings of another release may lack it
    try:
        return call(*args) if call else None
    except _failures(nvml):
        return None


def _read_gpus(nvml: Any) -> NvmlReading:
    gpus, notes = [], []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            gpus.append(_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index)))
        except _failures(nvml) as error:
            notes.append(f"card {index} does not answer: {_reason(error)}")
    version = _optional(nvml, "nvmlSystemGetDriverVersion")
    gpus.sort(key=lambda gpu: gpu.pci_bus_id or "")
    return NvmlReading(driver_version=version, gpus=gpus, notes=notes)


def _gpu(nvml: Any, handle: Any) -> NvmlGpu:
    memory = _optional(nvml, "nvmlDeviceGetMemoryInfo", handle)
    if memory is not None and not memory.total:
        memory = None  # unified memory, on drivers that do not call it "not supported"
    detailed = _optional(nvml, "nvmlDeviceGetMemoryInfo", handle, getattr(nvml, "nvmlMemory_v2", None))
    pci = _optional(nvml, "nvmlDeviceGetPciInfo", handle)
    mig = _optional(nvml, "nvmlDeviceGetMigMode", handle)
    return NvmlGpu(
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=_optional(nvml, "nvmlDeviceGetName", handle),
        total_bytes=memory.total if memory else None,
        free_bytes=memory.free if memory else None,
        used_bytes=memory.used if memory else None,
        driver_reserved_bytes=getattr(detailed, "reserved", None),
        pci_bus_id=pci.busId if pci else None,
        mig_mode=bool(mig[0]) if mig else None,
        mig_uuids=_slices(nvml, handle) if mig and mig[0] else [],
        driver_version=_optional(nvml, "nvmlSystemGetDriverVersion"),
    )


def _slices(nvml: Any, handle: Any) -> list[str]:
    uuids = []
    for index in range(_optional(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        piece = _optional(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
        uuids.append(_optional(nvml, "nvmlDeviceGetUUID", piece) if piece is not None else None)
    return [uuid for uuid in uuids if uuid is not None]


def _holders(nvml: Any, handle: Any) -> list[MemoryHolder]:
    compute = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    graphics = _optional(nvml, "nvmlDeviceGetGraphicsRunningProcesses", handle) or []
    used: dict[int, int | None] = {}
    for process in [*compute, *graphics]:
        # A process that computes and draws is listed twice, each time with all that it holds.
        figures = [figure for figure in (used.get(process.pid), process.usedGpuMemory) if figure is not None]
        used[process.pid] = max(figures, default=None)
    return [
        MemoryHolder(pid=pid, name=_optional(nvml, "nvmlSystemGetProcessName", pid) or None, used_bytes=size)
        for pid, size in sorted(used.items(), key=lambda item: (-(item[1] or 0), item[0]))
    ]
