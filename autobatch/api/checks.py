"""Checks of a model and its loss, in the process that holds them."""

from __future__ import annotations

from autobatch.core.errors import AutobatchError, InputError
from autobatch.core.progress import Progress
from autobatch.core.records.plan import Plan
from autobatch.report.result import Result
from autobatch.setup.child import ChildCrashed, SetupProcess
from autobatch.training.export import examine_weights
from autobatch.training.split_check.check import ANYWAY, examine
from autobatch.training.split_check.compare import Finding

CHECKING_SPLIT = "checking that the loss can be split into micro-batches"


def note_split(process: SetupProcess, result: Result, progress: Progress, *, is_last: bool = True) -> None:
    """Note a loss that cannot be split into micro-batches exactly, and what the forward pass writes.

    The check is an extra here: if it fails, that is a note too. An interrupted probe has no check.

    Args:
        process: holds the setup.
        result: the probe and, if there is one, the plan.
        progress: receives the notes.
        is_last: keep the result if the check is interrupted.
    """
    probe, plan = result.probe, result.plan
    if probe is None or probe.micro_batch < 1 or probe.stopped_by == "interrupt":
        return
    if process.info.layout is not None:
        progress.note(
            "autobatch fit checks on rank 0 that the loss can be split, because the ranks share the model"
        )
        return
    micro_batch = probe.micro_batch if plan is None else plan.micro_batch
    steps = 2 if plan is None else plan.accumulation_steps
    progress.doing(CHECKING_SPLIT)
    try:
        found = process.call("the check of the loss", examine, micro_batch, steps)
    except ChildCrashed as crash:
        process.restart()
        found = Finding(unchecked=str(crash))
    except AutobatchError as error:
        found = Finding(unchecked=str(error))
    except KeyboardInterrupt:
        if not is_last:
            raise
        found = Finding(unchecked="the check was interrupted")
    if plan is None:
        found = found._replace(remarks=())  # a probe has no batch to split
    for line in found.notes(is_split=steps > 1):
        progress.note(line)


def refuse_split(process: SetupProcess, plan: Plan) -> None:
    """Raise if the loss cannot be split into micro-batches, before minutes are spent on trials.

    Raises:
        InputError: it cannot be.
    """
    found = process.call("the check of the loss", examine, plan.micro_batch, plan.accumulation_steps)
    if found.fault is not None:
        raise InputError(f"{found.fault}. {ANYWAY}")


def refuse_weights(process: SetupProcess) -> None:
    """Raise if the weights could not be exported after training, before minutes are spent on a probe.

    Raises:
        InputError: they could not be.
    """
    process.call("the check of the weights", examine_weights)
