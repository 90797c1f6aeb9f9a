"""The pipeline of all commands, as stages of one `Run`.

    options ──► open ──► limit ──► plan ──► [tune] ──► train ──► write
                         (runs)   (exact)  (Optuna)             (result, report)

`autobatch.api.stages` has the stages before the training. With an isolated run, a child process opens the
workload for them, and this process opens it once more for the training. A resume opens a run with its stored
plan: the stages before the training run again only if something has changed that the plan depends on.
"""

from __future__ import annotations

import datetime
import shlex
from pathlib import Path

import msgspec

from autobatch.api.inputs import begin, resume
from autobatch.api.run import Run, agree_on_options
from autobatch.api.stages import open_workload, plan, probe, tune_and_split
from autobatch.core.files import write_atomic
from autobatch.core.options import Options
from autobatch.core.text import error_text
from autobatch.core.version import versions
from autobatch.estimates.estimator import estimate_limits
from autobatch.estimates.hugging_face import estimate_named, refuse_model_options
from autobatch.estimates.snapshots import estimate_snapshots
from autobatch.report.result import Estimates, Result, load_run
from autobatch.training.checkpoint import list_checkpoints
from autobatch.training.run import train_plan
from autobatch.training.run_folder import CHECKPOINTS, REPORT, RESULT, RunFiles
from autobatch.training.trackers import check_trackers
from autobatch.workload import demo
from autobatch.workload.reference import WorkloadSource, find_workload, is_named_model
from autobatch.workload.rng import preserved_generators


def run_command(run: Run) -> Result:
    """Run ``autobatch probe``, ``plan``, ``tune`` or ``fit``; all ranks call it.

    Raises:
        InputError: an option, the workload, or the content of the run's folder is invalid.
        DoesNotFitError: not even a micro-batch of 1 fits.
        AutobatchError: see `autobatch.training.run.train`.
    """
    agree_on_options(run)
    if run.ranks.rank == 0:
        check_trackers(run.options.log)
    if run.options.command == "fit":
        with run.held:
            return _fit(run)
    with preserved_generators(run.workload), run.trying:
        open_workload(run)
        if run.options.command == "probe":
            probe(run)
        else:
            plan(run)
            tune_and_split(run)
    return run.result


def run_estimate(workload: WorkloadSource, options: Options) -> Estimates:
    """Run ``autobatch estimate``. Memory snapshots stand in place of a workload.

    Raises:
        InputError: the options exclude each other, or the workload or a snapshot is invalid.
    """
    if options.snapshot:
        return estimate_snapshots(options)
    if is_named_model(workload):
        return estimate_named(workload, options)
    refuse_model_options(workload, options)
    return estimate_limits(find_workload(workload, options.seed), options)


def _fit(run: Run) -> Result:
    """Plan a run or take its stored plan, train it, and write the result and the report."""
    ranks = run.ranks
    if (earlier := ranks.earlier_out) is not None:
        # The launcher has started the run again.
        has_checkpoint = ranks.once(lambda: bool(list_checkpoints(earlier / CHECKPOINTS)))
        run.settle(out=str(earlier), resume=has_checkpoint)
    if run.options.steps is None and run.options.epochs is None:
        run.settle(**({"steps": demo.STEPS} if run.workload is None else {"epochs": 1}))
    with preserved_generators(run.workload):
        inputs = (resume if run.options.resume else begin)(run)
    out = run.out
    assert out is not None
    hint = resume_hint(run.command, out)
    files = RunFiles(out=out, options=run.options, resume_hint=hint, sinks=run.sinks)
    training, model = train_plan(inputs, files, progress=run.progress, ranks=ranks)
    # Of a model that ranks share, this one has a part only; the file has all of it.
    run.record(training=training, model=None if inputs.plan.parallel == "shard" else model)
    run.record(command=run.command, options=run.options.by_name())
    if ranks.rank == 0:
        _write_result(run, out)
    return run.result


def resume_hint(command: str, out: Path) -> str:
    """Return the command, quoted for a shell, or the call that resumes the run."""
    if not command:
        return f"autobatch.fit(…, out={str(out)!r}, resume=True)"
    words = [word for word in shlex.split(command) if word != "--resume"]
    has_folder = any(word == "--out" or word.startswith("--out=") for word in words)
    return shlex.join([*words, *(() if has_folder else ("--out", str(out))), "--resume"])


def _write_result(run: Run, out: Path) -> None:
    """Write the result and the report. A failed report is only noted: the run is done."""
    run.record(
        out=out,
        report=out / REPORT,
        versions=versions(),
        created=datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        checkpoints=[int(path.name.removeprefix("step-")) for path in list_checkpoints(out / CHECKPOINTS)],
    )
    content = msgspec.json.format(msgspec.json.encode(run.result.to_json()))
    write_atomic(out / RESULT, content + b"\n")
    run.progress.doing("writing the report")
    # Only here: matplotlib takes half a second to import.
    from autobatch.report.page import write_report

    try:
        write_report(out / REPORT, load_run(out))
    except Exception as error:  # whatever drawing raises, the training is done
        run.progress.note(f"the report could not be written: {type(error).__name__}: {error_text(error)}")
        run.record(report=None)
