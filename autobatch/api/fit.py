"""The whole pipeline: probe, plan, tune, train, and write the report."""

from __future__ import annotations

import datetime
import platform
import shlex
from contextlib import ExitStack
from pathlib import Path

import msgspec
import torch
from torch import nn

from autobatch.api.context import RunContext
from autobatch.api.over_ranks import continued
from autobatch.api.pipeline import checked_options
from autobatch.api.prepare import prepare, prepare_resume
from autobatch.core.files import write_atomic
from autobatch.core.options import Options
from autobatch.core.progress import Progress
from autobatch.core.text import error_text
from autobatch.core.version import commit, versions
from autobatch.device.host import usable_cores
from autobatch.device.nvml import driver_version
from autobatch.report.result import Result, load_run
from autobatch.training.checkpoints.checkpoint import list_checkpoints
from autobatch.training.export import whole_model
from autobatch.training.run_folder import (
    CHECKPOINTS,
    REPORT,
    RESULT,
    RunFiles,
)
from autobatch.training.train_plan import train_plan
from autobatch.workload import demo
from autobatch.workload.contract import Workload
from autobatch.workload.shared_model import shared_model_notes


def run_fit(workload: Workload | str | None, options: Options, context: RunContext) -> Result:
    """Run ``autobatch fit``: the whole pipeline.

    Raises:
        InputError: an option, the workload, or the content of the run's folder is invalid.
        AutobatchError: see `autobatch.training.run.train`.
    """
    ranks = context.ranks
    command = _repeat_command(context.command, options)
    options = continued(checked_options(options, ranks), ranks)
    ranks.limit_wait(options.ranks.collective_timeout)
    if options.train.steps is None and options.train.epochs is None:
        options = options.with_values(**({"steps": demo.STEPS} if workload is None else {"epochs": 1}))
    with ExitStack() as held:
        prepare_run = prepare_resume if options.train.resume else prepare
        ready = prepare_run(workload, options, context, held)
        for line in shared_model_notes(ready.run.setup.workload, ready.run.setup.model):
            context.progress.note(line)
        training, model = train_plan(
            ready.run,
            RunFiles(
                out=ready.out,
                options=options,
                resume_hint=_resume_hint(context.command, ready.out),
                sinks=context.sinks,
            ),
            progress=context.progress,
            ranks=ranks,
        )
        whole: nn.Module | None = model
        if ready.run.plan.parallel == "shard":
            # The command line has no use for it.
            is_wanted = ranks.rank == 0 and not context.isolated
            whole = whole_model(ready.run.setup.model, model, ready.out) if is_wanted else None
        result = msgspec.structs.replace(
            ready.result,
            training=training,
            model=whole,
            command=command,
            options=options.by_name(),
            surroundings=_surroundings(),
        )
        return _write(result, ready.out, context.progress) if ranks.rank == 0 else result


def _repeat_command(command: str, options: Options) -> str:
    """Return the command that runs the whole run again, without the resume that only ends it."""
    if not options.train.resume or not command:
        return command
    words = shlex.split(command)
    # An option of a config file or of the environment is overridden.
    return shlex.join([word for word in words if word != "--resume"] or words) + (
        "" if "--resume" in words else " --no-resume"
    )


def _resume_hint(command: str, out: Path) -> str:
    """Return the command, quoted for a shell, or the call that resumes the run."""
    if not command:
        return f"autobatch.fit(…, out={str(out)!r}, resume=True)"
    words = [word for word in shlex.split(command) if word != "--resume"]
    has_folder = any(word == "--out" or word.startswith("--out=") for word in words)
    return shlex.join([*words, *(() if has_folder else ("--out", str(out))), "--resume"])


def _write(result: Result, out: Path, progress: Progress) -> Result:
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
        why = f"{type(error).__name__}: {error_text(error)}"
        if isinstance(error, OSError):
            why = f"{error.filename or out / REPORT}: {error.strerror or error}"
        progress.note(f"the report could not be written: {why}")
        result = msgspec.structs.replace(result, report=None)
        _write_json(result, out)
    return result


def _surroundings() -> dict[str, str]:
    """Return what else a repetition would have to match: the source, cores and threads."""
    found = {
        "commit of the working directory": commit(Path.cwd()),
        "platform": platform.platform(),
        "cores": str(usable_cores()),
        "threads of torch": str(torch.get_num_threads()),
        "CUDA of torch": torch.version.cuda,
        "NVIDIA driver": driver_version(),
    }
    return {name: value for name, value in found.items() if value is not None}


def _write_json(result: Result, out: Path) -> None:
    content = msgspec.json.format(msgspec.json.encode(result.to_json()))
    write_atomic(out / RESULT, content + b"\n")
