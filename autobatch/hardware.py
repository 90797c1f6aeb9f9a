"""Hardware profiles: found by name or path, matched to the card that is here, listed and saved.

A profile is a hint for a card that need not be here; a card that is here is always measured. What is not
known of a card is absent (``None``), never 0.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import msgspec
import platformdirs

from autobatch.card import Figure, HardwareProfile, format_profile, read_profile
from autobatch.errors import InputError
from autobatch.files import write_atomic

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

SAME_CARD = 0.05
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
        user_dir: the data directory (:func:`data_home`); its ``profiles/NAME.toml`` are the user's own.
        package: the package that carries the shipped profiles.

    Raises:
        InputError: no such file or name, or the file is no profile.
    """
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return read_profile(path)
    if path.suffix == ".toml" or len(path.parts) > 1:
        raise InputError(f"no profile file at {name_or_path}")
    for folder in (user_dir / "profiles", shipped_profiles(package)):
        file = folder / f"{name_or_path}.toml"
        if file.is_file():
            return read_profile(file)
    raise InputError(_unknown(name_or_path, sorted({**_files(user_dir / "profiles"), **_shipped(package)})))


def list_profiles(*, user_dir: Path, package: str = "autobatch") -> Listing:
    """Read every profile that can be named, by name.

    Raises:
        InputError: a shipped profile is damaged. A damaged one of the user's own becomes a problem line.
    """
    found = {name: read_profile(file) for name, file in _shipped(package).items()}
    problems = []
    for name, file in _files(user_dir / "profiles").items():
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
    and the totals within ``SAME_CARD``, for some names stand for cards of several sizes. Nothing is guessed
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
        and abs(profile.total_bytes - total_bytes) <= SAME_CARD * profile.total_bytes
    ]
    return min(fitting, key=lambda profile: abs(profile.total_bytes - total_bytes), default=None)


def save_profile(profile: HardwareProfile, *, user_dir: Path) -> Path:
    """Write a profile under the user's own, whole or not at all, and return its path.

    Raises:
        InputError: the directory cannot be written.
    """
    path = user_dir / "profiles" / f"{profile.name}.toml"
    return save_or_explain(path, format_profile(profile).encode(), what="profile")


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
