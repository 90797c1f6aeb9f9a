"""Hardware profiles: the memory of GPUs, with the source of each figure; and the directory of data."""

from __future__ import annotations

import os
import re
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import platformdirs

from autobatch.core.errors import InputError
from autobatch.core.files import UNREADABLE, read_toml
from autobatch.core.text import error_text, quoted
from autobatch.core.units import MiB

Slug = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
Capability = Annotated[str, msgspec.Meta(pattern=r"^[0-9]+\.[0-9]+$")]
Day = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")]
Text = Annotated[str, msgspec.Meta(min_length=1)]
Positive = Annotated[int, msgspec.Meta(gt=0, le=2**63 - 1)]


USUAL_CONTEXT_BYTES = 512 * MiB
"""CUDA context of a GPU without a figure: CUDA's out-of-memory texts show between 0.1 and 0.7 GiB."""


class Figure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One figure of a GPU, with its source."""

    value: Positive
    unit: Literal["B"]
    source: Text
    date: Day
    """Day on which the figure was read from its source, or measured."""
    measured: bool
    """True only if autobatch measured it on such a GPU."""


class HardwareProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory of a GPU model, as a training process sees it."""

    schema: Literal[1]
    name: Slug
    title: Text
    vendor: Text
    capability: Capability = msgspec.field(name="compute_capability")
    total: Figure
    """Memory in torch: ``torch.cuda.get_device_properties(...).total_memory``."""
    context: Figure | None = None
    """Part of the total that the CUDA context, the driver and loaded kernels hold."""

    @property
    def total_bytes(self) -> int:
        """Memory of the GPU in torch, in bytes."""
        return self.total.value

    @property
    def context_bytes(self) -> int:
        """Memory of the CUDA context, in bytes; the usual one if it is unknown."""
        return self.context.value if self.context else USUAL_CONTEXT_BYTES

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Major and minor compute capability."""
        major, minor = map(int, self.capability.split("."))
        return major, minor


def read_profile(file: Path | Traversable) -> HardwareProfile:
    """Read a profile from a TOML file.

    Raises:
        InputError: The file is unreadable or no profile. The message names the file and the field.
    """
    try:
        return msgspec.convert(read_toml(file), HardwareProfile)
    except UNREADABLE as error:
        raise InputError(f"the profile {file} is not valid: {error_text(error)}") from error


def load_profile(name_or_path: str) -> HardwareProfile:
    """Load a profile; see `profile_file` and `read_profile`."""
    return read_profile(profile_file(name_or_path))


def profile_file(name_or_path: str) -> Path | Traversable:
    """Find the file of a profile: a path, else that of a shipped one by a name such as ``rtx-4090``.

    Raises:
        InputError: There is no such file or name.
    """
    path, known = Path(name_or_path).expanduser(), _shipped()
    if os.path.isfile(path):
        return path
    if name_or_path in known:
        return known[name_or_path]
    names = ", ".join(sorted(known)) or "none"
    raise InputError(f"no profile {quoted(name_or_path)}: known are {names}; or give the path of a TOML file")


def list_profiles() -> list[HardwareProfile]:
    """Read the shipped profiles, sorted by name."""
    return [read_profile(file) for _, file in sorted(_shipped().items())]


def data_home() -> Path:
    """Return the data directory of autobatch: ``AUTOBATCH_HOME``, else the user's data directory."""
    chosen = os.environ.get("AUTOBATCH_HOME")
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_data_dir("autobatch"))


def _shipped() -> dict[str, Path | Traversable]:
    """Return the shipped files by name: inside the package in a wheel, beside it in a checkout."""
    root = resources.files("autobatch")
    folder = root / "profiles"
    # Only in a checkout: a folder beside an installed package may belong to anyone.
    if isinstance(root, Path) and not folder.is_dir() and (root.parent / "pyproject.toml").is_file():
        folder = root.parent / "profiles"
    files = folder.iterdir() if folder.is_dir() else ()
    return {file.name[:-5]: file for file in files if re.fullmatch(r"[^.].*\.toml", file.name)}
