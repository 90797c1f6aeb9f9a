"""The end of a run: its result, its report, and the commands that repeat or resume it."""

from __future__ import annotations

import datetime
import platform
import shlex
import subprocess
from pathlib import Path

import msgspec
import torch

from autobatch.core.files import write_atomic
from autobatch.core.progress import Progress
from autobatch.core.text import error_text
from autobatch.core.version import versions
from autobatch.device.host import usable_cores
from autobatch.device.nvml import driver_version
from autobatch.report.result import Result, load_run
from autobatch.training.checkpoint import list_checkpoints
from autobatch.training.run_folder import CHECKPOINTS, REPORT, RESULT

GIT_SECONDS = 5.0
"""Time after which Git counts as absent, for example on a slow network file system."""


def repeat_command(command: str, *, resumes: bool) -> str:
    """Return the command that runs the whole run again, without the resume that only ends it."""
    if not resumes or not command:
        return command
    words = shlex.split(command)
    # An option of a config file or of the environment is overridden.
    return shlex.join([word for word in words if word != "--resume"] or words) + (
        "" if "--resume" in words else " --no-resume"
    )


def resume_hint(command: str, out: Path) -> str:
    """Return the command, quoted for a shell, or the call that resumes the run."""
    if not command:
        return f"autobatch.fit(…, out={str(out)!r}, resume=True)"
    words = [word for word in shlex.split(command) if word != "--resume"]
    has_folder = any(word == "--out" or word.startswith("--out=") for word in words)
    return shlex.join([*words, *(() if has_folder else ("--out", str(out))), "--resume"])


def surroundings() -> dict[str, str]:
    """Return what else a repetition would have to match: the source, cores and threads."""
    found = {
        "commit of the working directory": _commit(),
        "platform": platform.platform(),
        "cores": str(usable_cores()),
        "threads of torch": str(torch.get_num_threads()),
        "CUDA of torch": torch.version.cuda,
        "NVIDIA driver": driver_version(),
    }
    return {name: value for name, value in found.items() if value is not None}


def _commit() -> str | None:
    """Return the commit of the working directory, marked if files have changed; None without Git."""
    words = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def write_result(result: Result, out: Path, progress: Progress) -> Result:
    """Write ``result.json`` and the report. A failed report is only noted, because the training is done."""
    result = msgspec.structs.replace(
        result,
        out=out,
        report=out / REPORT,
        versions=versions(),
        created=datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        checkpoints=[int(path.name.removeprefix("step-")) for path in list_checkpoints(out / CHECKPOINTS)],
    )
    _write_json(result, out)
    progress.doing("writing the report")
    # Only here: matplotlib takes half a second to import.
    from autobatch.report.page import write_report

    try:
        write_report(out / REPORT, load_run(out))
    except Exception as error:  # whatever drawing raises, the training is done
        progress.note(f"the report could not be written: {type(error).__name__}: {error_text(error)}")
        result = msgspec.structs.replace(result, report=None)
        _write_json(result, out)
    return result


def _write_json(result: Result, out: Path) -> None:
    content = msgspec.json.format(msgspec.json.encode(result.to_json()))
    write_atomic(out / RESULT, content + b"\n")
