"""The commands that train nothing: ``doctor``, ``profiles`` and ``report``."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from autobatch.core.errors import InputError
from autobatch.core.units import format_bytes
from autobatch.core.version import __version__
from autobatch.device.profiles import (
    Figure,
    HardwareProfile,
    data_home,
    format_profile,
    list_profiles,
    load_profile,
    save_profile,
)

Say = Callable[[str], None]


PACKAGES = ("torch", "nvidia-ml-py", "optuna", "scipy", "numpy", "safetensors", "matplotlib", "tensorboard")
"""Distributions whose versions matter to a bug report."""


def profiles(arguments: list[str], say: Say) -> int:
    """``autobatch profiles [list | show NAME | save NAME]``.

    Raises:
        InputError: an unknown action or profile, or no card to save.
    """
    words, as_json = _words(arguments, "profiles [list | show NAME | save NAME]", say)
    if words is None:
        return 0
    home = data_home(os.environ)
    match words or ["list"]:
        case ["list"]:
            _list_profiles(home, say, as_json=as_json)
        case ["show", name]:
            profile = load_profile(name, user_dir=home)
            say(_json(profile) if as_json else format_profile(profile).rstrip())
        case ["save", name]:
            path = save_profile(this_gpu(name), user_dir=home)
            say(_json({"profile": str(path)}) if as_json else f"saved {path}")
        case _:
            raise InputError(f"profiles {' '.join(words)}: write profiles list, show NAME or save NAME")
    return 0


def report(arguments: list[str], say: Say) -> int:
    """``autobatch report RUN``: write the report of a run again.

    Raises:
        InputError: there is no such run.
    """
    words, as_json = _words(arguments, "report RUN", say)
    if words is None:
        return 0
    if len(words) != 1:
        raise InputError("report takes one folder of a run: autobatch report runs/NAME/DATE")
    from autobatch.report.page import write_report
    from autobatch.report.result import load_run

    folder = Path(words[0])
    path = write_report(folder / "report.html", load_run(folder))
    say(_json({"report": str(path)}) if as_json else str(path))
    return 0


def doctor(arguments: list[str], say: Say) -> int:
    """``autobatch doctor``: what this machine offers, and what is missing and why."""
    words, as_json = _words(arguments, "doctor", say)
    if words is None:
        return 0
    if words:
        raise InputError(f"doctor takes no arguments, found {' '.join(words)}")
    findings = examine()
    if as_json:
        say(_json({"schema": 1, "autobatch": __version__, **findings}))
        return 0
    for line in _doctor_lines(findings):
        say(line)
    return 0


def examine() -> dict[str, Any]:
    """Read the machine: host, cards, NVML, versions, and what is missing."""
    import torch

    from autobatch.device.cuda_gpus import visible_gpus
    from autobatch.device.host import cpu_name, host_memory
    from autobatch.device.nvml import NvmlAbsent, read_gpus, read_holders

    memory = host_memory()
    reading = read_gpus()
    absent = isinstance(reading, NvmlAbsent)
    nvml: dict[str, Any] = {"available": not absent}
    if isinstance(reading, NvmlAbsent):
        nvml["reason"] = reading.reason
    else:
        nvml["gpus"] = [
            msgspec.to_builtins(gpu) | {"holders": _holders(read_holders(gpu.uuid))} for gpu in reading.gpus
        ]
    return {
        "host": {"name": cpu_name(), **memory._asdict(), "cores": os.cpu_count()},
        "cuda": {
            "available": torch.cuda.is_available(),
            "built_for": torch.version.cuda,
            "gpus": msgspec.to_builtins(visible_gpus()),
        },
        "nvml": nvml,
        "versions": {"python": platform.python_version(), **_versions()},
        "home": str(data_home(os.environ)),
        "missing": _missing(torch.version.cuda, torch.cuda.is_available(), nvml),
    }


def this_gpu(name: str) -> HardwareProfile:
    """The profile of the card that is here, with what can be read of it.

    Raises:
        InputError: there is no card, or the name is no name for a profile.
    """
    import torch

    if not torch.cuda.is_available():
        raise InputError("there is no CUDA card here to save: profiles save NAME runs where the card is")
    properties = torch.cuda.get_device_properties(0)
    day = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    total = Figure(
        value=properties.total_memory,
        unit="B",
        source=f"torch {torch.__version__} get_device_properties",
        date=day,
        measured=True,
    )
    content = {
        "schema": 1,
        "name": name,
        "title": properties.name,
        "vendor": "NVIDIA",
        "compute_capability": f"{properties.major}.{properties.minor}",
        "device_names": [properties.name],
        "total": total,
    }
    try:
        return msgspec.convert(msgspec.to_builtins(content), HardwareProfile)
    except msgspec.ValidationError as error:
        raise InputError(f"{name!r} is no name for a profile ({error}): write it like rtx-4090") from None


def _words(arguments: list[str], usage: str, say: Say) -> tuple[list[str] | None, bool]:
    """The plain words of a small command, and whether JSON is asked for; ``None``: help was printed."""
    if "-h" in arguments or "--help" in arguments:
        say(f"usage: autobatch {usage} [--json]")
        return None, False
    unknown = [word for word in arguments if word.startswith("-") and word not in ("--json", "--verbose")]
    if unknown:
        raise InputError(f"there is no option {unknown[0]}; usage: autobatch {usage} [--json]")
    return [word for word in arguments if not word.startswith("-")], "--json" in arguments


def _list_profiles(home: Path, say: Say, *, as_json: bool) -> None:
    listing = list_profiles(user_dir=home)
    if as_json:
        say(_json({"schema": 1, "autobatch": __version__, "profiles": listing.profiles}))
        return
    for profile in listing.profiles:
        measured = "measured" if profile.total.measured else "from public sources"
        capability = ".".join(map(str, profile.compute_capability))
        say(
            f"{profile.name:<16} {format_bytes(profile.total_bytes):>9}  cc {capability:<5} "
            f"{profile.title} ({measured})"
        )
    for problem in listing.problems:
        say(f"not read: {problem}")


def _doctor_lines(findings: dict[str, Any]) -> list[str]:
    host, cuda, nvml = findings["host"], findings["cuda"], findings["nvml"]
    build = f"torch built for CUDA {cuda['built_for']}" if cuda["built_for"] else "torch built without CUDA"
    lines = [
        f"host     {host['name']}, {host['cores']} cores",
        f"memory   {format_bytes(host['available_bytes'])} available of {format_bytes(host['total_bytes'])}"
        f" ({host['source']})",
        f"cuda     {build}",
    ]
    lines += [
        f"         cuda:{gpu['index']} {gpu['name']}, {format_bytes(gpu['total_bytes'])}, "
        f"{format_bytes(gpu['free_bytes'])} free, cc {gpu['capability']}"
        for gpu in cuda["gpus"]
    ]
    lines.append(f"nvml     {'answers' if nvml['available'] else 'no: ' + nvml['reason']}")
    for gpu in nvml.get("gpus", ()):
        lines.append(f"         {gpu['name']}: {format_bytes(gpu['free_bytes'])} free")
        for holder in gpu["holders"]:
            who = f"process {holder['pid']} {holder['name'] or ''}"
            lines.append(f"           {who} {format_bytes(holder['used_bytes'])}")
    versions = findings["versions"]
    lines.append(
        "versions " + ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    )
    lines.append(f"home     {findings['home']}")
    lines += [f"missing  {line}" for line in findings["missing"]]
    return lines


def _holders(found: Any) -> list[Any]:
    return msgspec.to_builtins(found) if isinstance(found, list) else []


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _missing(built_for: str | None, available: bool, nvml: dict[str, Any]) -> list[str]:
    missing = []
    if built_for is None:
        missing.append("CUDA: this torch was built without it; training runs on the CPU, or on sim:PROFILE")
    elif not available:
        missing.append(
            "a CUDA card that torch can use: is the driver loaded, and CUDA_VISIBLE_DEVICES right?"
        )
    if not nvml["available"]:
        missing.append(
            f"NVML ({nvml['reason']}): budgets come from the driver's own figure, where there is one"
        )
    return missing


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
