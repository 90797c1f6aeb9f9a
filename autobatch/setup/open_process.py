"""The choice of the process that tries a workload: a child, or this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from autobatch.core.options import Options
from autobatch.setup.child import ChildProcess, SetupProcess, open_here
from autobatch.setup.setup import Role
from autobatch.setup.spare import Spare
from autobatch.workload.contract import Workload


@contextmanager
def open_process(
    workload: Workload | str | None,
    options: Options,
    role: Role = Role(),  # noqa: B008 - plain values
    *,
    isolated: bool,
    spare: Spare | None = None,
) -> Iterator[SetupProcess]:
    """Open the workload in a child process, or here.

    Args:
        workload: the workload, or a reference to it; None for the demo.
        options: options of the run.
        role: part of this process among the ranks.
        isolated: open a reference in a child.
        spare: a child that has begun to import torch; None to start one.

    Raises:
        InputError: the device, the budget, the workload or a setting is invalid.
    """
    if isolated and not isinstance(workload, Workload):
        with ChildProcess(
            workload, options, role, spare=None if spare is None or spare.is_taken else spare
        ) as child:
            yield child
        return
    yield open_here(workload, options, role)
