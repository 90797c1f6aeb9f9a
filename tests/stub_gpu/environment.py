"""The environment of the stub: torch's CUDA wheel, the stub libraries, and what the project needs.

It is made once, outside of the tree: in ``STUB_GPU_CACHE``, or in the user's cache folder. Wheels come by
name from the package index, and first from the folder that ``STUB_GPU_WHEELS`` names.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.stub_gpu.build import SOURCES, build

ROOT = Path(__file__).parents[2]
HEADERS = ("nvidia-cuda-runtime>=13,<14", "nvidia-cuda-crt>=13,<14")
TEST_TOOLS = ("pytest", "pytest-xdist", "hypothesis")
LEFT_OUT = ("PYTHONHOME", "PYTHONDONTWRITEBYTECODE")
# Torch's wheel asks for gigabytes of libraries that the stub replaces.
REPLACED = re.compile(r"Requires-Dist: (nvidia-|cuda-|triton).*\n")


class Unavailable(Exception):
    """Something that the environment is made of cannot be had."""


def prepare(torch: str, extras: bool = True) -> tuple[Path, dict[str, str]]:
    """Make a Python with torch's CUDA build, and the stub libraries for it, unless they exist.

    Args:
        torch: For example ``2.13.0``.
        extras: Whether to install the libraries that autobatch integrates with.

    Returns:
        The folder of the Python, and the variables under which a command runs on the stub.
    """
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = Path(os.environ.get("STUB_GPU_CACHE") or users / "autobatch-stub-gpu")
    cache.mkdir(parents=True, exist_ok=True)
    wanted = _requirements(extras)
    python = "py{}.{}".format(*sys.version_info)
    folder = _once(
        cache / f"torch-{torch}-{python}-{_digest(*wanted)}",
        lambda folder: _make_python(folder, torch, wanted),
    )
    headers = _once(
        cache / f"headers-{_digest(*HEADERS)}",
        lambda folder: _pip(Path(sys.executable), "--no-deps", "--target", str(folder), *HEADERS),
    )
    of_torch = next((folder / "lib").glob("python*/site-packages/torch/lib"))
    include = next(headers.rglob("cuda_runtime_api.h")).parent
    sources = [file.read_text() for file in sorted([*SOURCES.iterdir(), Path(build.__code__.co_filename)])]
    libraries = _once(
        cache / f"libraries-{torch}-{_digest(*sources)}", lambda folder: build(of_torch, include, folder)
    )
    return folder, {
        # Without the second, each process would compile all modules of torch anew.
        **{name: value for name, value in os.environ.items() if name not in LEFT_OUT},
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": str(folder),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(libraries), os.environ.get("LD_LIBRARY_PATH")])),
        "PYTHONPATH": str(ROOT),
    }


def _requirements(extras: bool) -> list[str]:
    """Return what pip installs beside torch, as the project names it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(optional["integrations"] if extras else [])]
    tools = [one for one in optional["dev"] if re.split(r"[<>=\[]", one)[0] in TEST_TOOLS]
    return [one for one in [*wanted, *tools] if re.split(r"[<>=\[]", one)[0] != "torch"]


def _make_python(folder: Path, torch: str, requirements: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    python = folder / "bin" / "python"
    # The machine's own settings may prefer a build without CUDA, which the index has not.
    machines = ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL")
    plain = {name: value for name, value in os.environ.items() if name not in machines}
    _pip(python, "--no-deps", f"torch=={torch}", variables={**plain, "PIP_CONFIG_FILE": os.devnull})
    metadata = next((folder / "lib").glob("python*/site-packages/torch-*.dist-info/METADATA"))
    metadata.write_text(REPLACED.sub("", metadata.read_text()))
    if not (metadata.parents[1] / "torch" / "lib" / "libtorch_cuda.so").exists():
        raise Unavailable(f"the package index has torch {torch} for this machine, but not with CUDA")
    _pip(python, *requirements, f"torch=={torch}")
    command = folder / "bin" / "autobatch"
    command.write_text('#!/bin/sh\nexec "$(dirname "$0")/python" -m autobatch "$@"\n')
    command.chmod(0o755)


def _pip(python: Path, *wanted: str, variables: dict[str, str] | None = None) -> None:
    wheels = os.environ.get("STUB_GPU_WHEELS")
    options = ["-q", "--disable-pip-version-check", "--no-compile"]
    if wheels:
        options += ["--find-links", wheels]
    command = [str(python), "-m", "pip", "install", *options, *wanted]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise Unavailable(f"pip cannot install {' '.join(wanted)}: {reason}")


def _once(folder: Path, make: Callable[[Path], object]) -> Path:
    """Make a folder under its lock, unless it is complete, and return it."""
    done = folder.with_suffix(folder.suffix + ".done")
    with folder.with_suffix(folder.suffix + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            make(folder)
            done.touch()
    return folder


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


@contextmanager
def shared_table() -> Iterator[str]:
    """Yield the path of a table of who holds what, for the processes that share the stub's GPUs."""
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.NamedTemporaryFile(prefix="stub-gpu-", dir=folder) as file:
        yield file.name
