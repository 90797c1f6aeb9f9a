"""One kind of card: its figures, each with unit, source and date, and their TOML file."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import platformdirs

from autobatch.core.errors import InputError
from autobatch.core.files import write_atomic

SCHEMA = 1


Slug = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]


Capability = Annotated[str, msgspec.Meta(pattern=r"^[0-9]+\.[0-9]+$")]


Day = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")]


Text = Annotated[str, msgspec.Meta(min_length=1)]


Positive = Annotated[int, msgspec.Meta(gt=0)]


class Figure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One figure of a card, with where it comes from."""

    value: Positive
    unit: Literal["B", "B/s", "FLOP/s", "count"]
    source: Text
    date: Day
    """The day on which the figure was read from its source, or measured."""
    measured: bool
    """True only if autobatch measured it on such a card."""


class HardwareProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a kind of card offers to a training process."""

    schema: Literal[1]
    name: Slug
    title: Text
    vendor: Text
    capability: Capability = msgspec.field(name="compute_capability")
    device_names: tuple[Text, ...] = ()
    """The names under which the driver knows the card."""
    total: Figure
    """What torch sees: ``torch.cuda.get_device_properties(...).total_memory``."""
    nvml_total: Figure | None = None
    """What ``nvidia-smi`` shows, which is more than torch sees."""
    context: Figure | None = None
    """What the CUDA context, the driver and the loaded kernels hold of the total."""
    cublas_workspace: Figure | None = None
    """Size of one cuBLAS workspace; it comes out of the caching allocator and stays."""
    cublas_workspaces: Figure | None = None
    """How many of them a training process holds."""
    memory_bandwidth: Figure | None = None
    dense_bf16: Figure | None = None
    dense_fp16: Figure | None = None

    def __post_init__(self) -> None:
        """Hold every figure to its unit.

        Raises:
            ValueError: a figure has another unit than its field.
        """
        for field, unit in _UNITS.items():
            figure = getattr(self, field)
            if figure is not None and figure.unit != unit:
                raise ValueError(f"unit of {field} is {figure.unit!r}: it must be {unit!r}")

    @property
    def total_bytes(self) -> int:
        """Memory of the card as torch sees it, in bytes."""
        return self.total.value

    @property
    def context_bytes(self) -> int | None:
        """Memory that the CUDA context holds, in bytes."""
        return self.context.value if self.context else None

    @property
    def workspaces(self) -> tuple[int, int] | None:
        """Bytes of one cuBLAS workspace and how many a training process holds; ``None``: not known."""
        if self.cublas_workspace is None or self.cublas_workspaces is None:
            return None
        return self.cublas_workspace.value, self.cublas_workspaces.value

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
    "memory_bandwidth": "B/s",
    "dense_bf16": "FLOP/s",
    "dense_fp16": "FLOP/s",
}


def read_profile(file: Path | Traversable) -> HardwareProfile:
    """Read one TOML file.

    Raises:
        InputError: it cannot be read or is no profile; the message names the file and the field.
    """
    try:
        table = tomllib.loads(file.read_bytes().decode())
    except OSError as error:
        raise InputError(f"cannot read the profile {file}: {error.strerror or error}") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise InputError(f"the profile {file} is not TOML: {error}") from error
    if table.get("schema") not in (None, SCHEMA):
        raise InputError(f"the profile {file} has schema {table['schema']!r}: this autobatch reads {SCHEMA}")
    try:
        return msgspec.convert(table, HardwareProfile)
    except msgspec.ValidationError as error:
        raise InputError(f"the profile {file} is not valid: {error}") from error


def format_profile(profile: HardwareProfile) -> str:
    """Write a profile as TOML, in the order of its fields; what is not known is left out."""
    lines, tables = [], []
    for field, value in msgspec.to_builtins(profile).items():
        if isinstance(value, dict):
            tables += ["", f"[{field}]", *(f"{key} = {_toml(item)}" for key, item in value.items())]
        elif value is not None:
            lines.append(f"{field} = {_toml(value)}")
    return "\n".join([*lines, *tables, ""])


def _toml(value: object) -> str:
    """JSON's scalars and lists of strings are TOML too, but for the delete character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


__all__ = [
    "Figure",
    "HardwareProfile",
    "Listing",
    "data_home",
    "format_profile",
    "list_profiles",
    "load_profile",
    "match_profile",
    "read_profile",
    "save_or_explain",
    "save_profile",
    "shipped_profiles",
]


PROFILE = "profile.toml"
"""File of a saved profile, in the folder that is named after it."""
SAME_GPU = 0.05
"""How far two totals of the same card may lie apart: driver, ECC and system take up to that share."""


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """The profiles that can be named, and the files that should be profiles and are not."""

    profiles: tuple[HardwareProfile, ...]
    """By name; a profile of the user's own hides the shipped one of that name."""
    problems: tuple[str, ...] = ()
    """One line for each of the user's files that cannot be read."""


def data_home(environ: Mapping[str, str]) -> Path:
    """Where autobatch keeps what it learned: ``AUTOBATCH_HOME``, else the user's data directory."""
    chosen = environ.get("AUTOBATCH_HOME")
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_data_dir("autobatch"))


def load_profile(name_or_path: str, *, user_dir: Path, package: str = "autobatch") -> HardwareProfile:
    """Find a profile: an existing file, else one of the user's own by name, else one that is shipped.

    Args:
        name_or_path: a path to a TOML file, or a name such as ``rtx-4090``.
        user_dir: the data directory; its ``profiles/NAME/profile.toml`` are the user's own.
        package: the package that carries the shipped profiles.

    Raises:
        InputError: no such file or name, or the file is no profile.
    """
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return read_profile(path)
    if path.suffix == ".toml" or len(path.parts) > 1:
        raise InputError(f"no profile file at {name_or_path}")
    known = {**_shipped(package), **_saved(user_dir)}
    if name_or_path in known:
        return read_profile(known[name_or_path])
    raise InputError(_unknown(name_or_path, sorted(known)))


def list_profiles(*, user_dir: Path, package: str = "autobatch") -> Listing:
    """Read every profile that can be named, by name.

    Raises:
        InputError: a shipped profile is damaged. A damaged one of the user's own becomes a problem line.
    """
    found = {name: read_profile(file) for name, file in _shipped(package).items()}
    problems = []
    for name, file in _saved(user_dir).items():
        try:
            found[name] = read_profile(file)
        except InputError as error:
            problems.append(str(error))
    return Listing(profiles=tuple(found[name] for name in sorted(found)), problems=tuple(problems))


def match_profile(
    name: str,
    total_bytes: int,
    compute_capability: tuple[int, int],
    *,
    user_dir: Path,
    package: str = "autobatch",
) -> HardwareProfile | None:
    """Find the profile of a card that is here.

    The driver's name and the compute capability must be equal (but for case, and the words NVIDIA and Tesla),
    and the totals within ``SAME_GPU``, for some names stand for cards of several sizes. Nothing is guessed
    from a part of a name: an H200 is no H20.

    Args:
        name: the card's name as the driver gives it.
        total_bytes: memory of the card as torch sees it, in bytes.
        compute_capability: major and minor.
        user_dir: the data directory.
        package: the package that carries the shipped profiles.

    Returns:
        The profile whose total is nearest, or ``None``.
    """
    fitting = [
        profile
        for profile in list_profiles(user_dir=user_dir, package=package).profiles
        if _plain(name) in {_plain(known) for known in (profile.title, *profile.device_names)}
        and profile.compute_capability == compute_capability
        and abs(profile.total_bytes - total_bytes) <= SAME_GPU * profile.total_bytes
    ]
    return min(fitting, key=lambda profile: abs(profile.total_bytes - total_bytes), default=None)


def save_profile(profile: HardwareProfile, *, user_dir: Path) -> Path:
    """Write a profile under the user's own, whole or not at all, and return its path.

    Raises:
        InputError: the directory cannot be written.
    """
    path = user_dir / "profiles" / profile.name / PROFILE
    return save_or_explain(path, format_profile(profile).encode(), what="profile")


def profile_folder(device: str, *, user_dir: Path) -> Path:
    """Return the folder of the data directory that keeps what is known of a device.

    Args:
        device: its name, as the driver gives it.
        user_dir: the data directory.

    Returns:
        The folder of the saved profile that lists this name; without one, a folder named after the device.
    """
    for folder in sorted((user_dir / "profiles").glob(f"*/{PROFILE}")):
        try:
            profile = read_profile(folder)
        except InputError:
            continue
        if _plain(device) in {_plain(known) for known in (profile.title, *profile.device_names)}:
            return folder.parent
    return user_dir / "profiles" / (re.sub(r"[^a-z0-9]+", "-", device.casefold()).strip("-") or "device")


def save_or_explain(path: Path, content: bytes, *, what: str) -> Path:
    """Write a file of the data directory atomically.

    Raises:
        InputError: it cannot be written; the message names the file and the way out.
    """
    try:
        return write_atomic(path, content)
    except OSError as error:
        raise InputError(
            f"cannot save the {what} at {path}: {error.strerror or error}; set AUTOBATCH_HOME to a directory "
            "that can be written"
        ) from error


def shipped_profiles(package: str = "autobatch") -> Traversable:
    """The folder of the shipped profiles: in the wheel inside the package, in a checkout beside it."""
    root = resources.files(package)
    inside = root / "profiles"
    if inside.is_dir() or not isinstance(root, Path):
        return inside
    beside = root.parent / "profiles"
    # only a checkout's own: beside an installed package may stand anybody's
    return beside if (root.parent / "pyproject.toml").is_file() else inside


def _plain(name: str) -> str:
    return " ".join(word for word in name.casefold().split() if word not in {"nvidia", "tesla"})


def _saved(user_dir: Path) -> dict[str, Path]:
    return {file.parent.name: file for file in (user_dir / "profiles").glob(f"*/{PROFILE}")}


def _shipped(package: str) -> dict[str, Traversable]:
    return _files(shipped_profiles(package))


def _files(folder: Path | Traversable) -> dict[str, Traversable]:
    if not folder.is_dir():
        return {}
    return {file.name[:-5]: file for file in folder.iterdir() if re.fullmatch(r"[^.].*\.toml", file.name)}


def _unknown(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name.casefold().replace(" ", "-").replace("_", "-"), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    known = ", ".join(names) or "none"
    return f"no profile {name!r}: {hint}known are {known}; or give the path of a TOML file"
