"""Whole commands on a GPU: the demo twice, a run that is stopped and resumed, the tests."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu.device import NAME

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "autobatch"]
CHECK = ["--split-check", "off"] if "STUB_GPU_STATE" in os.environ else []
"""On the stub of `tests.stub_gpu` losses are garbage."""
STOPPED = 143


@contextmanager
def fresh_home() -> Iterator[dict[str, str]]:
    """Return an environment without saved limits."""
    # What the caller's path has stays: on a borrowed machine it holds the packages that were carried there.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        yield os.environ | {"AUTOBATCH_HOME": folder, "PYTHONPATH": path}


def run(arguments: list[str], environ: dict[str, str], folder: str | None = None) -> dict[str, Any]:
    """Run a command, and return its exit code, seconds, JSON and the end of what it said.

    Raises:
        RuntimeError: the command failed, so that a later call tries it again.
    """
    start = time.perf_counter()
    done = subprocess.run(
        [*COMMAND, *arguments], env=environ, cwd=folder, capture_output=True, text=True, check=False
    )
    said = done.stderr.splitlines()[-12:]
    if done.returncode:
        raise RuntimeError("\n".join([f"exit {done.returncode} of {' '.join(arguments)}", *said]))
    return {
        "command": " ".join(arguments),
        "exit": done.returncode,
        "seconds": round(time.perf_counter() - start, 2),
        "json": json.loads(done.stdout),
        "said": said,
    }


def demo() -> dict[str, Any]:
    """Fit the demo twice: the second time, the saved limit answers."""
    with fresh_home() as environ, tempfile.TemporaryDirectory() as folder:
        given = ["fit", "--target-batch", "1024", "--device", NAME, "--json", *CHECK]
        if importlib.util.find_spec("optuna") is None:
            given += ["--trials", "0"]
        return {
            "first": run([*given, "--out", "one"], environ, folder),
            "second": run([*given, "--out", "two"], environ, folder),
        }


def resume(steps: int) -> dict[str, Any]:
    """Stop a run by SIGTERM, resume it, and compare its weights with an uninterrupted run, bit for bit.

    If they differ, a second uninterrupted run tells whether its kernels are deterministic at all.
    """
    given = ["fit", "--target-batch", "256", "--steps", str(steps), "--trials", "0", "--device", NAME]
    given += ["--checkpoint-every", "5", "--json", *CHECK]
    with fresh_home() as environ, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = run([*given, "--out", "whole"], environ, name)
        stopped = stop_after(10, folder / "parts/metrics.jsonl", [*given, "--out", "parts"], environ, name)
        resumed = run([*given, "--out", "parts", "--resume"], environ, name)
        sums = [digest(folder / which / "model.safetensors") for which in ("whole", "parts")]
        is_equal = sums[0] is not None and sums[0] == sums[1]
        if not is_equal:
            run([*given, "--out", "again"], environ, name)
        return {
            "exits": [whole["exit"], stopped, resumed["exit"]],
            "stopped_within": stopped == STOPPED,
            "equal": is_equal,
            "repeatable": is_equal or digest(folder / "again" / "model.safetensors") == sums[0],
        }


def stop_after(rows: int, metrics: Path, arguments: list[str], environ: dict[str, str], folder: str) -> int:
    """Start a run, send SIGTERM after some steps, and return its exit code."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([*COMMAND, *arguments], env=environ, cwd=folder, **quiet) as process:
        while process.poll() is None:
            if metrics.exists() and metrics.read_text().count("\n") >= rows:
                process.send_signal(signal.SIGTERM)
                break
            time.sleep(0.01)
        return process.wait()


def digest(file: Path) -> str | None:
    """Return the SHA-256 of a file; None without one."""
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else None


def tests(out: Path) -> dict[str, Any]:
    """Run the tests that need a GPU, with warnings as warnings, and count their outcomes."""
    report, names = out / "tests.xml", sorted((ROOT / "tests").rglob("test_*.py"))
    files = [str(file.relative_to(ROOT)) for file in names if "pytest.mark.gpu" in file.read_text()]
    given = ["-m", "pytest", "-m", "gpu", "-o", "addopts=", "-W", "default", "-p", "no:cacheprovider", "-q"]
    # A file that needs a package which is not there does not keep the others from running.
    given += ["--continue-on-collection-errors", f"--junitxml={report}", *files]
    with fresh_home() as environ:
        done = subprocess.run(
            [sys.executable, *given], env=environ, cwd=ROOT, capture_output=True, text=True, check=False
        )
    if not report.exists():
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
        raise RuntimeError(f"pytest wrote no report (exit {done.returncode}): {said[-1]}")
    return outcomes(report) | {"exit": done.returncode, "said": done.stdout.splitlines()[-15:]}


def outcomes(report: Path) -> dict[str, Any]:
    """Read a JUnit file: how many tests passed, and what the others said."""
    passed, skipped, failures = 0, 0, {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        what = {part.tag: part.get("message") or "" for part in case}
        if said := what.get("failure", what.get("error")):
            failures[f"{case.get('classname')}::{case.get('name')}"] = said[:500]
        skipped += "skipped" in what
        passed += not {"failure", "error", "skipped"} & {*what}
    return {"passed": passed, "skipped": skipped, "failed": len(failures), "failures": failures}
