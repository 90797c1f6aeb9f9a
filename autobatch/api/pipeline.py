"""The pipeline of all commands, as stages of one `Run`.

    options ──► open ──► limit ──► plan ──► [tune] ──► train ──► write
                         (runs)   (exact)  (Optuna)             (result, report)

`autobatch.api.stages` has the stages before the training. With an isolated run, a child process opens the
workload for them, and this process opens it once more for the training. A resume opens a run with its stored
plan: the stages before the training run again only if something has changed that the plan depends on.
"""

from __future__ import annotations

import datetime
import platform
import shlex
import subprocess
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

from autobatch.api.inputs import begin, make_room, resume
from autobatch.api.ranks import agree_on_options, claim_of_ranks, continue_after_restart
from autobatch.api.run import Run
from autobatch.api.stages import finish_plan, open_workload, plan, probe
from autobatch.core.files import write_atomic
from autobatch.core.text import error_text
from autobatch.core.version import versions
from autobatch.device.host import usable_cores
from autobatch.estimates.estimator import estimate_limits
from autobatch.estimates.hugging_face import estimate_named, refuse_model_options
from autobatch.estimates.snapshots import estimate_snapshots
from autobatch.report.result import Estimates, Result, load_run
from autobatch.training.checkpoint import list_checkpoints
from autobatch.training.run import train_plan
from autobatch.training.run_folder import CHECKPOINTS, REPORT, RESULT, RunFiles
from autobatch.training.trackers import check_trackers
from autobatch.workload import demo
from autobatch.workload.reference import find_workload, is_named_model, shared_model_notes
from autobatch.workload.rng import preserved_generators

GIT_SECONDS = 5.0
"""Time after which Git counts as absent, for example on a slow network file system."""


def run_command(run: Run) -> Result:
    """Run ``autobatch probe``, ``plan``, ``tune`` or ``fit``; all ranks call it.

    An interrupted probe of one process answers with the largest size so far, except for ``tune`` and ``fit``.

    Raises:
        InputError: an option, the workload, or the content of the run's folder is invalid.
        DoesNotFitError: not even a micro-batch of 1 fits.
        AutobatchError: see `autobatch.training.run.train`.
    """
    run.ranks.limit_wait(run.options.collective_timeout)
    agree_on_options(run)
    if run.ranks.rank == 0:
        check_trackers(run.options.log)
    with run.held:
        if run.options.command == "fit":
            continue_after_restart(run)
            return fit(run)
        with preserved_generators(run.workload), run.trying:
            asked = run.options.out
            if asked is not None:
                claim_of_ranks(run, lambda: Path(asked))
            open_workload(run)
            (probe if run.options.command == "probe" else plan)(run)
            make_room(run)
            finish_plan(run)
        return run.result if run.out is None else _write_result(run)


def run_estimate(run: Run) -> Estimates:
    """Run ``autobatch estimate``.

    Raises:
        InputError: the options exclude each other, or the workload or a snapshot is invalid.
    """
    if run.options.snapshot:
        found = estimate_snapshots(run.options)
        if run.workload is None:
            return found
        note = "the workload was left out: --snapshot says what a program takes"
        return msgspec.structs.replace(found, notes=[note, *found.notes])
    if is_named_model(run.workload):
        return estimate_named(run.workload, run.options)
    refuse_model_options(run.workload, run.options)
    workload = find_workload(run.workload, run.options.seed)
    return estimate_limits(workload, run.options)


def fit(run: Run) -> Result:
    """Plan a run or take its stored plan, train it, and write the result and the report."""
    options = run.options
    run.command = _repeat_command(run.command, resumes=options.resume)
    if options.steps is None and options.epochs is None:
        run.settle(**({"steps": demo.STEPS} if run.workload is None else {"epochs": 1}))
    with preserved_generators(run.workload):
        inputs = (resume if options.resume else begin)(run)
    assert run.out is not None
    for line in shared_model_notes(inputs.setup.workload, inputs.setup.model):
        run.progress.note(line)
    hint = resume_hint(run.command, run.out)
    files = RunFiles(out=run.out, options=run.options, resume_hint=hint, sinks=run.sinks)
    training, model = train_plan(inputs, files, progress=run.progress, ranks=run.ranks)
    # Of a model that ranks share, this one has a part only; the file has all of it.
    run.record(training=training, model=None if inputs.plan.parallel == "shard" else model)
    return _write_result(run)


def _repeat_command(command: str, *, resumes: bool) -> str:
    """Return the command that repeats the whole run, without ``--resume``, which would only finish it."""
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


def _write_result(run: Run) -> Result:
    """Complete a result; rank 0 writes it and the report. A failed report is only noted: the run is done."""
    run.record(command=run.command, options=run.options.by_name(), surroundings=_surroundings())
    out = run.out
    if run.ranks.rank or out is None:
        return run.result
    run.record(
        out=out,
        report=out / REPORT,
        versions=versions(),
        created=datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        checkpoints=[int(path.name.removeprefix("step-")) for path in list_checkpoints(out / CHECKPOINTS)],
    )
    _write_json(run.result, out)
    run.progress.doing("writing the report")
    # Only here: matplotlib takes half a second to import.
    from autobatch.report.page import write_report

    try:
        write_report(out / REPORT, load_run(out))
    except Exception as error:  # whatever drawing raises, the training is done
        run.progress.note(f"the report could not be written: {type(error).__name__}: {error_text(error)}")
        run.record(report=None)
        # The first one says all else, and the disk may be full by now.
        with suppress(OSError):
            _write_json(run.result, out)
    return run.result


def _write_json(result: Result, out: Path) -> None:
    content = msgspec.json.format(msgspec.json.encode(result.to_json()))
    write_atomic(out / RESULT, content + b"\n")
