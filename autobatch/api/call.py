"""One call of a command or of the library."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from autobatch.core.options import Options
from autobatch.core.progress import Progress
from autobatch.device.profiles import data_home
from autobatch.distributed.ranks import Ranks
from autobatch.rehearsal.process import ChildProcess
from autobatch.training.metrics import Sink, Until
from autobatch.workload.reference import WorkloadSource


@dataclass(frozen=True, kw_only=True)
class Call:
    """The request of a call, and its surroundings: progress, process and environment."""

    workload: WorkloadSource
    """The workload, or a reference to it; None for the demo."""
    options: Options
    progress: Progress = field(default_factory=Progress)
    ranks: Ranks = field(default_factory=Ranks)
    """The processes that run this call together."""
    world_size: int | None = None
    """Ranks to plan for, of another launcher; None for those that run."""
    isolated: bool = False
    """True to try a workload in a child process if it is given as a reference."""
    child: ChildProcess | None = None
    """A child that has begun to import torch; None to start one when it is needed."""
    command: str = ""
    """The command line that repeats this call."""
    sinks: tuple[Sink, ...] = ()
    """Receive the records of the training besides the files of the run."""
    until: Until | None = None
    """The user's own rule that ends the training after a step; None to train to its end."""
    entered: Callable[[Path], None] = lambda _: None
    """Receives the folder of a run as soon as it is known."""

    @property
    def home(self) -> Path:
        """The data directory."""
        return data_home(os.environ)

    def with_options(self, **values: Any) -> Self:
        """Return this call with other values of some options, by their names."""
        return replace(self, options=self.options.with_values(**values))
