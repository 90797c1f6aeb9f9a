"""Hardware profiles by name: those that are shipped, and those that the user saved."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import msgspec
import platformdirs

from autobatch.core.errors import InputError
from autobatch.core.files import is_file, write_atomic
from autobatch.core.text import LONGEST_VALUE, cut, quoted
from autobatch.device.hardware_profile import HardwareProfile, format_profile, read_profile

PROFILE = "profile.toml"
"""File of a saved profile, in the folder that is named after it."""
SAME_GPU = 0.05
"""Largest relative difference between two totals of the same GPU: driver, ECC and system take up to that."""


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """All profiles by name, and the user's files that are invalid."""

    profiles: tuple[HardwareProfile, ...]
    """Sorted by name. A saved profile replaces the shipped one of that name."""
    problems: tuple[str, ...] = ()
    """Errors of the user's files, one per line."""


def data_home(environ: Mapping[str, str]) -> Path:
    """Return the data directory of autobatch: ``AUTOBATCH_HOME``, else the user's data directory."""
    chosen = environ.get("AUTOBATCH_HOME")
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_data_dir("autobatch"))


def load_profile(name_or_path: str, *, user_dir: Path, package: str = "autobatch") -> HardwareProfile:
    """Load a profile: from a path, else a saved one by name, else a shipped one.

    Args:
        name_or_path: Path of a TOML file, or a name such as ``rtx-4090``.
        user_dir: The data directory. Saved profiles are its ``profiles/NAME/profile.toml``.
        package: The package with the shipped profiles.

    Raises:
        InputError: There is no such file or name, or the file is no profile.
    """
    path = Path(name_or_path).expanduser()
    if is_file(path):
        return read_profile(path)
    if path.suffix == ".toml" or len(path.parts) > 1:
        raise InputError(f"no profile file at {cut(name_or_path, LONGEST_VALUE)}")
    known = {**_shipped(package), **_saved(user_dir)}
    if name_or_path in known:
        return read_profile(known[name_or_path])
    raise InputError(_unknown(name_or_path, sorted(known)))


def list_profiles(*, user_dir: Path, package: str = "autobatch") -> Listing:
    """Read all profiles, sorted by name. An invalid saved profile becomes a line of `Listing.problems`.

    Raises:
        InputError: A shipped profile is invalid.
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
    """Find the profile of a GPU in this machine.

    The driver's name (except for case and the words NVIDIA and Tesla) and the compute capability must be
    equal. The totals must agree within ``SAME_GPU``, because GPUs of several sizes share a name. Parts of a
    name do not
    count: an H200 is not an H20.

    Args:
        name: Name of the GPU in the driver.
        total_bytes: Memory of the GPU in torch, in bytes.
        compute_capability: Major and minor.
        user_dir: The data directory.
        package: The package with the shipped profiles.

    Returns:
        The profile with the nearest total; None if no profile matches.
    """
    fitting = [
        profile
        for profile in list_profiles(user_dir=user_dir, package=package).profiles
        if _is_named(profile, name)
        and profile.compute_capability == compute_capability
        and abs(profile.total_bytes - total_bytes) <= SAME_GPU * profile.total_bytes
    ]
    return min(fitting, key=lambda profile: abs(profile.total_bytes - total_bytes), default=None)


def save_profile(profile: HardwareProfile, *, user_dir: Path) -> Path:
    """Save a profile in the data directory atomically, and return its path.

    Raises:
        InputError: The directory is not writable.
    """
    path = user_dir / "profiles" / profile.name / PROFILE
    return save_or_explain(path, format_profile(profile).encode())


def profile_folder(device: str, *, user_dir: Path) -> Path:
    """Return the folder in the data directory for the profile and the cached limits of a device.

    Args:
        device: Name of the device in the driver.
        user_dir: The data directory.

    Returns:
        The folder of the saved profile that lists this name; without one, a folder named after the device.
    """
    for file in sorted((user_dir / "profiles").glob(f"*/{PROFILE}")):
        try:
            profile = read_profile(file)
        except InputError:
            continue
        if _is_named(profile, device):
            return file.parent
    return user_dir / "profiles" / (re.sub(r"[^a-z0-9]+", "-", device.casefold()).strip("-") or "device")


def save_or_explain(path: Path, content: bytes) -> Path:
    """Write a file of the data directory atomically, and return its path.

    Raises:
        InputError: The file is not writable. The message names it, and ``AUTOBATCH_HOME``.
    """
    try:
        return write_atomic(path, content)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {error.strerror or error}; set AUTOBATCH_HOME to a writable directory"
        ) from error


def shipped_profiles(package: str = "autobatch") -> Traversable:
    """Return the folder of the shipped profiles: inside the package in a wheel, beside it in a checkout."""
    root = resources.files(package)
    inside = root / "profiles"
    if inside.is_dir() or not isinstance(root, Path):
        return inside
    beside = root.parent / "profiles"
    # Only in a checkout: a folder beside an installed package may belong to anyone.
    return beside if (root.parent / "pyproject.toml").is_file() else inside


def _is_named(profile: HardwareProfile, device: str) -> bool:
    return _plain(device) in {_plain(known) for known in (profile.title, *profile.device_names)}


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
    asked = name.casefold().replace(" ", "-").replace("_", "-")
    longer = [known for known in names if known.startswith(f"{asked}-")]
    near = longer or difflib.get_close_matches(asked, names, n=1)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    known = ", ".join(names) or "none"
    return f"no profile {quoted(name)}: {hint}known are {known}; or give the path of a TOML file"
