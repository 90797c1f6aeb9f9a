"""The GPUs that CUDA will show to this process, resolved before any CUDA context exists."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from autobatch.core.records.base import Record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from autobatch.device.nvml import NvmlGpu

_ORDINAL = re.compile(r"[+-]?[0-9]+")


class VisibleGpus(Record, frozen=True, kw_only=True):
    """The GPUs that CUDA will show, in its order."""

    uuids: list[str] | None
    """None if the order is unknown."""
    note: str | None = None


def visible_gpus(environ: Mapping[str, str], gpus: Sequence[NvmlGpu]) -> VisibleGpus:
    """Resolve ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER`` to UUIDs in CUDA's order.

    The rules are CUDA's. The first entry decides whether indices, ``GPU-`` prefixes or ``MIG-`` names are
    listed. The list ends at the first invalid entry (``-1``, nonsense, an ambiguous prefix). A GPU that is
    named twice empties it.

    Args:
        environ: The environment to read, usually ``os.environ``.
        gpus: All GPUs of the machine, as `autobatch.device.nvml.read_gpus` lists them.
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
        return VisibleGpus(uuids=None, note="a GPU is split by MIG: name its slice in CUDA_VISIBLE_DEVICES")
    return found


def _by_name(entries: list[str], prefix: str, known_uuids: list[str], *, known: bool) -> VisibleGpus:
    uuids: list[str] = []
    for entry in entries:
        # Without privileges NVML hides slices: then the name is taken literally.
        matches = [uuid for uuid in known_uuids if uuid.startswith(entry)] if known else [entry]
        if not entry.startswith(prefix) or len(matches) != 1:
            break
        uuids += matches
    return _without_repeats(uuids)


def _by_index(entries: list[str] | None, order: str | None, gpus: Sequence[NvmlGpu]) -> VisibleGpus:
    by_bus = [gpu.uuid for gpu in sorted(gpus, key=lambda gpu: gpu.pci_bus_id or "")]
    indices = list(range(len(by_bus))) if entries is None else []
    for entry in entries or ():
        match = _ORDINAL.match(entry)  # like strtoul: "1x" is 1
        if match is None or not 0 <= int(match[0]) < len(by_bus):
            break
        indices.append(int(match[0]))
    alike = len({gpu.name for gpu in gpus}) == 1 and None not in {gpu.name for gpu in gpus}
    if indices and order != "PCI_BUS_ID" and len(gpus) > 1 and not alike:
        return VisibleGpus(
            uuids=None,
            note="CUDA numbers different GPUs by speed: set CUDA_DEVICE_ORDER=PCI_BUS_ID for bus order",
        )
    return _without_repeats([by_bus[index] for index in indices])


def _without_repeats(uuids: list[str]) -> VisibleGpus:
    if len(set(uuids)) < len(uuids):
        return VisibleGpus(uuids=[], note="CUDA_VISIBLE_DEVICES names a GPU twice: CUDA then shows none")
    return VisibleGpus(uuids=uuids)
