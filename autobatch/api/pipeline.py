"""The pipeline of all commands, as functions of one `Call`.

    options ──► setup ──► footprint ──► search ──► plan ──► [tune] ──► loop ──► report
                          (traced)      (run)    (exact)   (Optuna)            (facts)

With an isolated call, one child process opens the workload for the search, the trials and the short runs, and
this process opens it once more for the training. A resume is the pipeline with a stored plan: the stages
before the training run again only if something has changed that the plan depends on.
"""

from __future__ import annotations

import datetime
import platform
import shlex
import subprocess
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
from torch import nn

from autobatch.api.call import Call
from autobatch.api.prepare import prepare
from autobatch.api.ranks import agree_on_options, continue_after_restart
from autobatch.api.stages import OpenSetup, finish_plan, search_and_plan
from autobatch.core.files import write_atomic
from autobatch.core.progress import Broadcast, Progress
from autobatch.core.text import error_text
from autobatch.core.version import versions
from autobatch.device.host import usable_cores
from autobatch.device.nvml import driver_version
from autobatch.distributed.ranks import SignsOfLife
from autobatch.estimates.estimator import estimate_limits
from autobatch.report.result import Estimates, Result, load_run
from autobatch.training.checkpoint import list_checkpoints
from autobatch.training.export import whole_model
from autobatch.training.run import train_plan
from autobatch.training.run_folder import CHECKPOINTS, REPORT, RESULT, RunFiles
from autobatch.workload import demo
from autobatch.workload.reference import find_workload, shared_model_notes

GIT_SECONDS = 5.0
"""Time after which Git counts as absent, for example on a slow network file system."""


def run(call: Call) -> Result:
    """Run ``autobatch probe``, ``plan``, ``tune`` or ``fit``; all ranks call it.

    An interrupted probe of one process answers with the largest size so far, except for ``tune`` and ``fit``.

    Raises:
        InputError: an option, the workload, or the content of the run's folder is invalid.
        DoesNotFitError: not even a micro-batch of 1 fits.
        AutobatchError: see `autobatch.training.run.train`.
    """
    call = agree_on_options(call)
    call.ranks.limit_wait(call.options.ranks.collective_timeout)
    call = replace(call, progress=Broadcast([call.progress, SignsOfLife(call.ranks)]))
    tune = call.options.tune
    if tune.storage is not None and (tune.trials != 0 or tune.tune_lr):
        # Only here: Optuna takes half a second to import.
        from autobatch.tuning.study import check_storage

        check_storage(tune.storage)
    if call.options.command == "fit":
        return fit(continue_after_restart(call))
    with ExitStack() as opened:
        setup = OpenSetup(call, opened)
        return finish_plan(call, setup, search_and_plan(call, setup))


def run_estimate(call: Call) -> Estimates:
    """Run ``autobatch estimate``.

    Raises:
        InputError: the options exclude each other, or the workload is invalid.
    """
    workload = find_workload(call.workload, call.options.device.seed)
    return estimate_limits(workload, call.options, home=call.home)


def fit(call: Call) -> Result:
    """Plan a run or take its stored plan, train it, and write the result and the report."""
    ranks, train = call.ranks, call.options.train
    call = replace(call, command=_repeat_command(call.command, resumes=train.resume))
    if train.steps is None and train.epochs is None:
        call = call.with_options(**({"steps": demo.STEPS} if call.workload is None else {"epochs": 1}))
    with ExitStack() as lock:
        result, prepared, out = prepare(call, lock)
        for line in shared_model_notes(prepared.setup.workload, prepared.setup.model):
            call.progress.note(line)
        hint = resume_hint(call.command, out)
        files = RunFiles(out=out, options=call.options, resume_hint=hint, sinks=call.sinks)
        training, model = train_plan(prepared, files, progress=call.progress, ranks=ranks)
        whole: nn.Module | None = model
        if prepared.plan.parallel == "shard":
            # The command line has no use for it.
            is_wanted = ranks.rank == 0 and not call.isolated
            whole = whole_model(prepared.setup.model, model, out) if is_wanted else None
        result = msgspec.structs.replace(
            result,
            training=training,
            model=whole,
            command=call.command,
            options=call.options.by_name(),
            surroundings=_surroundings(),
        )
        return _write_result(result, out, call.progress) if ranks.rank == 0 else result


def _repeat_command(command: str, *, resumes: bool) -> str:
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


def _surroundings() -> dict[str, str]:
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


def _write_result(result: Result, out: Path, progress: Progress) -> Result:
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
