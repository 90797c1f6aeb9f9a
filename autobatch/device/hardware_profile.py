"""The data sheet of a GPU: its figures with unit, source and date, and their TOML file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec

from autobatch.core.errors import InputError
from autobatch.core.files import UNREADABLE, read_toml
from autobatch.core.text import error_text, quoted

SCHEMA = 1
Slug = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
Capability = Annotated[str, msgspec.Meta(pattern=r"^[0-9]+\.[0-9]+$")]
Day = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")]
Text = Annotated[str, msgspec.Meta(min_length=1)]
Positive = Annotated[int, msgspec.Meta(gt=0, le=2**63 - 1)]


class Processors(NamedTuple):
    """The processors of a GPU, on which the scratch memory of its reductions depends."""

    multiprocessors: int
    threads: int
    """Most threads that each of them runs at a time."""


class Libraries(NamedTuple):
    """Memory that CUDA's libraries and kernels take on a GPU beside tensors."""

    workspaces: tuple[int, int] | None
    """Bytes of one cuBLAS workspace, and their number in a training process; None if unknown."""
    processors: Processors


USUAL_PROCESSORS = Processors(108, 2048)
"""Those of an A100, for a GPU whose figures are unknown."""
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
"""Most resident threads of a multiprocessor by compute capability, if these are not 2048 (CUDA C++
Programming Guide, technical specifications per compute capability)."""


class Figure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One figure of a GPU, with its source."""

    value: Positive
    unit: Literal["B", "B/s", "FLOP/s", "count"]
    source: Text
    date: Day
    """Day on which the figure was read from its source, or measured."""
    measured: bool
    """True only if autobatch measured it on such a GPU."""


class HardwareProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Figures of a GPU model for a training process.

    Predictions read the total, the context, the workspaces and the multiprocessors. The other figures are
    for people.
    """

    schema: Literal[1]
    name: Slug
    title: Text
    vendor: Text
    capability: Capability = msgspec.field(name="compute_capability")
    device_names: tuple[Text, ...] = ()
    """Names that the driver uses for the GPU."""
    total: Figure
    """Memory in torch: ``torch.cuda.get_device_properties(...).total_memory``."""
    nvml_total: Figure | None = None
    """Memory in ``nvidia-smi``, which is more than in torch."""
    context: Figure | None = None
    """Part of the total that the CUDA context, the driver and loaded kernels hold."""
    cublas_workspace: Figure | None = None
    """Size of one cuBLAS workspace. The caching allocator provides it."""
    cublas_workspaces: Figure | None = None
    """Number of them in a training process."""
    multiprocessors: Figure | None = None
    """Streaming multiprocessors."""
    memory_bandwidth: Figure | None = None
    dense_bf16: Figure | None = None
    dense_fp16: Figure | None = None

    def __post_init__(self) -> None:
        """Check the unit of every figure.

        Raises:
            ValueError: A figure has another unit than its field.
        """
        for field, unit in _UNITS.items():
            figure = getattr(self, field)
            if figure is not None and figure.unit != unit:
                raise ValueError(f"unit of {field} is {figure.unit!r}: it must be {unit!r}")

    @property
    def total_bytes(self) -> int:
        """Memory of the GPU in torch, in bytes."""
        return self.total.value

    @property
    def context_bytes(self) -> int | None:
        """Memory of the CUDA context, in bytes; None if unknown."""
        return self.context.value if self.context else None

    @property
    def workspaces(self) -> tuple[int, int] | None:
        """Bytes of one cuBLAS workspace, and their number in a training process; None if unknown."""
        if self.cublas_workspace is None or self.cublas_workspaces is None:
            return None
        return self.cublas_workspace.value, self.cublas_workspaces.value

    @property
    def libraries(self) -> Libraries:
        """Memory of the libraries, for the usual number of multiprocessors if theirs is unknown."""
        count = (
            USUAL_PROCESSORS.multiprocessors if self.multiprocessors is None else self.multiprocessors.value
        )
        threads = _THREADS.get(self.compute_capability, USUAL_PROCESSORS.threads)
        return Libraries(self.workspaces, Processors(count, threads))

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Major and minor compute capability."""
        major, minor = self.capability.split(".")
        return int(major), int(minor)


_UNITS: Mapping[str, str] = {
    "total": "B",
    "nvml_total": "B",
    "context": "B",
    "cublas_workspace": "B",
    "cublas_workspaces": "count",
    "multiprocessors": "count",
    "memory_bandwidth": "B/s",
    "dense_bf16": "FLOP/s",
    "dense_fp16": "FLOP/s",
}


def read_profile(file: Path | Traversable) -> HardwareProfile:
    """Read a profile from a TOML file.

    Raises:
        InputError: The file is unreadable or no profile. The message names the file and the field.
    """
    table = read_toml(file)
    schema = table.get("schema")
    if schema not in (None, SCHEMA):
        raise InputError(f"the profile {file} has schema {quoted(schema)}: this autobatch reads {SCHEMA}")
    try:
        return msgspec.convert(table, HardwareProfile)
    except UNREADABLE as error:
        raise InputError(f"the profile {file} is not valid: {error_text(error)}") from error


def format_profile(profile: HardwareProfile) -> str:
    """Return a profile as TOML, in the order of its fields, without unknown figures."""
    lines, tables = [], []
    for field, value in msgspec.to_builtins(profile).items():
        if isinstance(value, dict):
            tables += ["", f"[{field}]", *(f"{key} = {_toml(item)}" for key, item in value.items())]
        elif value is not None:
            lines.append(f"{field} = {_toml(value)}")
    return "\n".join([*lines, *tables, ""])


def _toml(value: object) -> str:
    """Return a JSON value as TOML: the same for scalars and lists of strings, except the delete character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
