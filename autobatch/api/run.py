"""One run of a command or of a library call, and what its ranks agree on: options, data and folder."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from autobatch.core import versions
from autobatch.core.errors import InputError
from autobatch.core.files import clean_unfinished
from autobatch.core.options import Options, spelled
from autobatch.core.progress import Progress
from autobatch.core.records import Plan
from autobatch.distributed.ranks import VERDICT, Ranks, launched_world
from autobatch.rehearsal.process import ChildProcess, SetupProcess
from autobatch.report.result import Result
from autobatch.training.checkpoint import Loaded
from autobatch.training.metrics import Sink, Until
from autobatch.training.run_folder import claim_folder, folder_of
from autobatch.workload.data import DataDigest, check_same_data
from autobatch.workload.user_code import WorkloadSource

SHARED_SECONDS = 30.0
"""Longest wait until a file of rank 0 shows on every rank; network file systems keep listings for a while."""
OWN_OPTIONS = ("device", "memory_budget", "json", "quiet", "verbose")
"""Options in which ranks may differ."""


@dataclass(kw_only=True)
class Run:
    """A run on one rank, which the stages fill in. All ranks run the same stages. Use each once."""

    workload: WorkloadSource
    """The workload, or a reference to it; None for the demo."""
    options: Options
    """Those that were asked for; a stage may settle some of them."""
    progress: Progress = field(default_factory=Progress)
    ranks: Ranks = field(default_factory=Ranks)
    """The processes that run this together."""
    world_size: int | None = None
    """Ranks to plan for, of another launcher; None for those that run."""
    command: str = ""
    """The command line that repeats this run; empty for a library call."""
    child: ChildProcess | None = None
    """Tries the workload, and may have begun to import torch; None to try it in this process."""
    sinks: tuple[Sink, ...] = ()
    """Receive the records of the training besides the files of the run."""
    until: Until | None = None
    """The user's own rule that ends the training after a step; None to train to its end."""

    trying: ExitStack = field(default_factory=ExitStack)
    """Keeps the process open that holds the setup before the training."""
    process: SetupProcess = field(init=False)
    """That process, once it is open."""
    held: ExitStack = field(default_factory=ExitStack)
    """Keeps the folder of the run locked until the end."""
    checkpoint: Loaded | None = None
    """The checkpoint that the run continues from; None for a new run."""
    is_exact: bool = True
    """False if something has changed since the checkpoint that the plan depends on."""
    loss_notes: list[str] = field(default_factory=list)
    """Remarks of the check of the loss."""
    result: Result = field(init=False)
    """The records of the stages so far, once there are any."""

    @property
    def target(self) -> int:
        """Samples per optimizer step, of a command that plans."""
        assert self.options.target_batch is not None
        return self.options.target_batch

    @property
    def planned_world(self) -> int:
        """Ranks that a plan is for."""
        if self.options.command == "plan" and self.ranks.world == 1:
            return self.world_size or launched_world(os.environ)
        return self.ranks.world

    @property
    def plan(self) -> Plan:
        """The plan, once there is one."""
        assert self.result.plan is not None
        return self.result.plan

    def record(self, **records: Any) -> None:
        """Put records of a stage into the result."""
        self.result = msgspec.structs.replace(self.result, **records)

    def settle(self, **values: Any) -> None:
        """Give some options other values, by their names."""
        self.options = replace(self.options, **values)


def agree_on_options(run: Run) -> None:
    """Check that the ranks can do what was asked for, and settle the device of this rank.

    Raises:
        InputError: they cannot, or ranks differ in an option or a version.
    """
    options, world = run.options, run.ranks.world
    if options.ranks not in (None, world):
        raise InputError(
            f"ranks is {options.ranks}, and {world} run: only the command autobatch starts ranks. Start "
            "others with torchrun, and leave ranks out"
        )
    if world == 1 and options.parallel == "shard":
        raise InputError(
            "--parallel shard shares a model among ranks, found one process: give --ranks N with N at "
            "least 2, or start with torchrun"
        )
    common = {name: value for name, value in options.by_name().items() if name not in OWN_OPTIONS}
    run.settle(device=run.ranks.device(options.device))
    run.ranks.check_equal({spelled(name): value for name, value in common.items()} | versions())


def check_data_of_ranks(data: DataDigest | None, ranks: Ranks, resumed: Loaded | None = None) -> None:
    """Check that all ranks read the same training data, and those of the run that they resume.

    Args:
        data: what this rank reads; None if nothing tells its data from others.
        ranks: the ranks; all of them call it.
        resumed: the checkpoint; None for a new run.

    Raises:
        InputError: some rank reads other data.
    """
    digests = ranks.gather(data)
    whose = [f"rank {rank}" for rank in range(ranks.world)] if ranks.world > 1 else ["this run"]
    if resumed is not None:
        digests.insert(0, msgspec.convert(resumed.facts.get("data"), DataDigest | None))
        whose.insert(0, f"the checkpoint {resumed.path}")
    check_same_data(digests, whose)


def claim(run: Run, name: str) -> Path:
    """Lock the folder of the run on rank 0 until its end, make it known to all ranks, and return it.

    Args:
        run: of this rank.
        name: of the workload, for the folder of a run that asks for none.

    Raises:
        InputError: there is no run to resume, the folder is not writable, another run holds it, or a rank
            does not see it.
    """

    def lock() -> tuple[str, str]:
        out = folder_of(run.options.out, name, resume=run.options.resume)
        run.held.enter_context(claim_folder(out))
        clean_unfinished(out)
        # An earlier start left it: no rank of this one knows the folder yet.
        (out / VERDICT).unlink(missing_ok=True)
        mark = out / f".{secrets.token_hex(8)}.tmp"  # which the next start cleans
        mark.touch()
        run.held.callback(mark.unlink, missing_ok=True)
        return str(out), str(mark)

    out, mark = map(Path, run.ranks.once(lock))
    run.ranks.enter(out, mark)
    deadline = time.monotonic() + SHARED_SECONDS
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    seen = run.ranks.gather((mark.exists(), run.ranks.host))
    for rank, (is_seen, host) in enumerate(seen):
        if not is_seen:
            raise InputError(
                f"rank {rank} on {host} does not see the folder of the run {out.absolute()}: give an --out "
                "that all hosts share"
            )
    return out
