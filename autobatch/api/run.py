"""One run of a command or of a library call: what was asked for, and what its stages have found so far."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from autobatch.core.options import Options
from autobatch.core.progress import Progress
from autobatch.core.records import Plan, Probe
from autobatch.device.profiles import data_home
from autobatch.distributed.ranks import Ranks
from autobatch.rehearsal.process import ChildProcess, SetupProcess
from autobatch.report.result import Result
from autobatch.training.metrics import Sink, Until
from autobatch.workload.reference import WorkloadSource


@dataclass(kw_only=True)
class Run:
    """A run on one rank, which the stages of `autobatch.api.pipeline` fill in. All ranks run the same stages.

    Use each once.
    """

    workload: WorkloadSource
    """The workload, or a reference to it; None for the demo."""
    options: Options
    """Those that were asked for; a stage may settle some of them."""
    progress: Progress = field(default_factory=Progress)
    ranks: Ranks = field(default_factory=Ranks)
    """The processes that run this together."""
    world_size: int | None = None
    """Ranks to plan for, of another launcher; None for those that run."""
    isolated: bool = False
    """True to try a workload in a child process if it is given as a reference."""
    child: ChildProcess | None = None
    """A child that has begun to import torch; None to start one when it is needed."""
    command: str = ""
    """The command line that repeats this run."""
    sinks: tuple[Sink, ...] = ()
    """Receive the records of the training besides the files of the run."""
    until: Until | None = None
    """The user's own rule that ends the training after a step; None to train to its end."""
    entered: Callable[[Path], None] = lambda _: None
    """Receives the folder of the run as soon as it is known."""

    held: ExitStack = field(default_factory=ExitStack)
    """Keeps the folder of the run locked until the end."""
    out: Path | None = None
    """The folder of the run; None if it has none."""
    trying: ExitStack = field(default_factory=ExitStack)
    """Keeps the process open that holds the setup before the training."""
    process: SetupProcess | None = None
    """That process; None if it is not open."""
    may_share: bool = False
    """True as long as the ranks may still share the model."""
    shards: int | None = None
    """Ranks that share the model; None if each has a whole one."""
    layout_reason: str | None = None
    """The reason for that; None if it was asked for."""
    found: Result | None = None
    """The records of the stages so far; None before the first one."""

    @property
    def home(self) -> Path:
        """The data directory."""
        return data_home(os.environ)

    @property
    def target(self) -> int:
        """Samples per optimizer step, of a command that plans."""
        assert self.options.target_batch is not None
        return self.options.target_batch

    @property
    def setup(self) -> SetupProcess:
        """The process that holds the setup, once it is open."""
        assert self.process is not None
        return self.process

    @property
    def result(self) -> Result:
        """The records of the stages so far, once there are any."""
        assert self.found is not None
        return self.found

    @property
    def plan(self) -> Plan:
        """The plan, once there is one."""
        assert self.result.plan is not None
        return self.result.plan

    @property
    def probe(self) -> Probe:
        """The probe, once it ran."""
        assert self.result.probe is not None
        return self.result.probe

    def record(self, **records: Any) -> None:
        """Put records of a stage into the result."""
        self.found = msgspec.structs.replace(self.result, **records)

    def settle(self, **values: Any) -> None:
        """Give some options other values, by their names."""
        self.options = self.options.with_values(**values)
