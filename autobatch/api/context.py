"""The surroundings of a call."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autobatch.core.progress import Progress
from autobatch.device.profiles import data_home
from autobatch.distributed.ranks import Ranks
from autobatch.setup.standby import Standby
from autobatch.training.metrics import Sink


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Surroundings of a call: its progress, its process and its environment."""

    progress: Progress = field(default_factory=Progress)
    ranks: Ranks = field(default_factory=Ranks)
    """The processes that run this call together."""
    isolated: bool = False
    """True to try a workload in a child process if it is given as a reference."""
    standby: Standby | None = None
    """A child that has begun to import torch; None to start one when it is needed."""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    command: str = ""
    """The command line that repeats this call."""
    sinks: tuple[Sink, ...] = ()
    """Receive the records of the training besides the files of the run."""
    entered: Callable[[Path], None] = lambda _: None
    """Receives the folder of a run as soon as it is known."""
    clock: Callable[[], float] = time.monotonic

    @property
    def home(self) -> Path:
        """The data directory."""
        return data_home(self.environ)

    def expiry(self, seconds: float | None) -> Callable[[], bool]:
        """Return a function that checks if this many seconds have passed since now; None for no limit."""
        start = self.clock()
        return lambda: seconds is not None and self.clock() - start > seconds
