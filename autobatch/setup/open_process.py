"""The choice of the process that tries a workload: a child, a copy of this process, or this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from autobatch.setup.child import ChildProcess, SetupProcess, open_here
from autobatch.setup.copied import CannotCopyError, start_copy, why_not_copied
from autobatch.setup.setup import SetupSettings
from autobatch.setup.spare import Spare
from autobatch.workload.contract import Workload


@contextmanager
def open_process(
    workload: Workload | str | None,
    settings: SetupSettings,
    *,
    isolated: bool,
    spare: Spare | None = None,
) -> Iterator[SetupProcess]:
    """Open the workload in a child process, or here.

    One of several ranks opens it in a copy of this process if there is no other child, because a batch over
    all ranks must not fail here.

    Args:
        workload: the workload, or a reference to it; None for the demo.
        settings: how the setup is opened.
        isolated: open a reference in a child.
        spare: a child that has begun to import torch; None to start one.

    Raises:
        InputError: the device, the budget, the workload or a setting is invalid.
    """
    if isolated and not isinstance(workload, Workload):
        with ChildProcess(
            workload, settings, spare=None if spare is None or spare.is_taken else spare
        ) as child:
            yield child
        return
    if settings.world == 1:
        yield open_here(workload, settings)
        return
    with ExitStack() as opened:
        yield _copied(workload, settings, opened)


def _copied(workload: Workload | str | None, settings: SetupSettings, opened: ExitStack) -> SetupProcess:
    """Open the workload in a copy of this process, or here if no copy is possible."""
    reason = why_not_copied()
    if reason is None:
        try:
            return opened.enter_context(ChildProcess(None, settings, start=partial(start_copy, workload)))
        except CannotCopyError as error:
            reason = str(error)
    here = open_here(workload, settings)
    here.reason = reason
    return here
