"""Programs that have no `Workload`, run at sizes within a budget.

The program runs as it is, up to its third optimizer step. A recorder comes in by the environment, also into
the ranks that a launcher starts (`autobatch.integrations.recorder`). All of them must fit, and the events of
the one that reserves most count.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

import msgspec

from autobatch.core.errors import InputError
from autobatch.core.progress import Progress
from autobatch.core.records import Attempt, DeviceRecord
from autobatch.core.units import format_bytes
from autobatch.device.cuda_allocator import fraction_of
from autobatch.device.snapshot_file import Recording, read_recordings
from autobatch.estimates.snapshots import OnPools
from autobatch.integrations.record import recorded
from autobatch.rehearsal.attempt import Outcome
from autobatch.report.words import plural

STEPS = 3
"""Optimizer steps of a run: state appears in the first, and later ones find it and the gradients there."""
SIZE, ACCUMULATION, OF_ALL_RANKS = "{}", "{steps}", "{total_steps}"
"""Places in a command: for the size of a micro-batch, for the micro-batches of a rank in an optimizer step,
and for those of all ranks."""
PROBED_ACCUMULATION = 2
"""Micro-batches of a rank in a step of a run, of a command that accumulates."""
MOST_RANKS = 8
"""Number of ranks for which the first run has as many micro-batches, while their number is unknown."""
LOOK_SECONDS = 0.2
"""Time between two looks at a program that runs."""
TAIL_BYTES, TAIL_LINES = 50_000, 3
"""The end of the program's output in which an exception is looked for, and the lines to quote without one."""
EXCEPTION = re.compile(r"(\[rank\d+\]: )?(?!subprocess\.)[A-Za-z_.]+(Error|Exception|Interrupt|Exit)(: .+)?$")
"""Last line of a traceback, but for those of launchers: that of torchrun ends in a colon, and those of
accelerate and DeepSpeed tell of a ``subprocess``."""


@dataclass(frozen=True)
class Command:
    """A command line with a place for the size of a micro-batch.

    Raises:
        InputError: it has none.
    """

    words: tuple[str, ...]

    def __post_init__(self) -> None:
        if not any(SIZE in word for word in self.words):
            raise InputError(
                f"no word of the command has a {SIZE} for the size of a micro-batch: {self}. "
                f"Write for example --batch_size={SIZE}"
            )

    def __str__(self) -> str:
        return shlex.join(self.words)

    @property
    def accumulates(self) -> bool:
        """True if it has a place for the number of micro-batches in a step."""
        return any(place in word for word in self.words for place in (ACCUMULATION, OF_ALL_RANKS))

    def at(self, size: int, steps: int, world: int) -> list[str]:
        """Return the words for a size, and a number of micro-batches of each rank in a step."""
        words = [*self.words]
        for place, value in {OF_ALL_RANKS: steps * world, ACCUMULATION: steps, SIZE: size}.items():
            words = [word.replace(place, str(value)) for word in words]
        return words

    def files(self) -> str:
        """Return a digest of the files that it names."""
        content = hashlib.sha256()
        for part in (part for word in self.words for part in re.split("[=,]", word) if SIZE not in part):
            with suppress(OSError, ValueError):
                content.update(Path(part).read_bytes())
        return content.hexdigest()[:16]


class Process(msgspec.Struct):
    """A process of the program that has used a GPU, as the recorder describes it."""

    snapshot: str
    steps: int
    """Optimizer steps that it took."""
    retries: int
    """Times that its allocator found no memory, and emptied its cache."""
    peak_allocated_bytes: int
    peak_reserved_bytes: int

    def refusal(self, budget_bytes: int) -> str | None:
        """Return why it does not fit, in words; None if it does."""
        held = format_bytes(self.peak_reserved_bytes)
        if self.retries and self.steps < STEPS:
            return f"out of memory, after holding {held}"
        if self.retries:
            return "the allocator had to empty its cache to find memory"
        is_over = self.peak_reserved_bytes > budget_bytes
        return f"the allocator held {held}, over the budget" if is_over else None


@dataclass
class Runner:
    """Runs of a command at sizes, within a budget."""

    command: Command
    device: DeviceRecord
    """The GPU, and the bytes that the allocator of each process may hold."""
    seconds: int
    """Time for the steps of a run."""
    log: Path
    """Receives what the program prints."""
    echo: Callable[[bytes], object] | None
    """Receives it, too."""
    progress: Progress
    """Receives each run."""
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    """Of the runs, by size."""
    world: int = 0
    """Ranks of the program; 0 until it has run."""
    recording: Recording | None = None
    """That of the largest run that fits."""
    largest: int = 0
    """Its size; 0 if none has fitted."""

    def run(self, size: int) -> Outcome:
        """Run the command at a size, until its optimizer has taken `STEPS` steps.

        Raises:
            InputError: it cannot be started. No size has fitted, and it takes no such step for another reason
                than its size. Or the size changes nothing.
        """
        words = self.command.at(size, PROBED_ACCUMULATION, self.world or MOST_RANKS)
        self.progress.doing(f"running {shlex.join(words)}")
        outcome = self._run(size, words)
        self.progress.attempted(outcome.attempt)
        for other, earlier in self.outcomes.items():
            if outcome.trace is not None and outcome.trace == earlier.trace:
                raise InputError(
                    f"the command allocates the same memory at {other} and at {size}, so {SIZE} is not the "
                    f"size of its micro-batch: {self.command}"
                )
        self.outcomes[size] = outcome
        return outcome

    def new_allocator(self, *, falls: bool = False) -> OnPools:
        """Return an empty model of the allocator of the largest run that fits, limited to the budget.

        Args:
            falls: each new segment lies below those before it.
        """
        pools = () if self.recording is None else self.recording.pools
        is_expandable = self.recording is not None and self.recording.is_expandable
        return OnPools(self.device.budget_bytes, pools, expandable=is_expandable, falls=falls)

    def _run(self, size: int, words: Sequence[str]) -> Outcome:
        start, budget = time.monotonic(), self.device.budget_bytes
        with tempfile.TemporaryDirectory(prefix="autobatch-") as folder, self.log.open("ab+") as log:
            printed = log.tell()
            code = self._execute(words, folder, log)
            files = [file.read_bytes() for file in sorted(Path(folder).glob("*.json"))]
            processes = [msgspec.json.decode(file, type=Process) for file in files]
            processes = [process for process in processes if process.peak_reserved_bytes]
            ranks = [process for process in processes if process.steps]
            attempt = partial(Attempt, micro_batch=size, seconds=time.monotonic() - start)
            refused = [process for process in processes if process.refusal(budget)]
            if refused or (code == 0 and ranks and all(process.steps >= STEPS for process in ranks)):
                most = max(refused or ranks, key=lambda process: process.peak_reserved_bytes)
                recording = None if refused else read_recordings(Path(most.snapshot))[0]
                if recording is not None and size > self.largest:
                    self.recording, self.largest, self.world = recording, size, len(ranks)
                ran = attempt(
                    fits=not refused,
                    peak_allocated_bytes=most.peak_allocated_bytes,
                    peak_reserved_bytes=most.peak_reserved_bytes,
                    reason=most.refusal(budget),
                )
                return Outcome(ran, None if recording is None else recording.trace)
            error = InputError(
                f"{shlex.join(words)} {self._ending(code, processes)}. Its last words, in {self.log}: "
                f"{_last_words(log, printed)}"
            )
        if not self.largest and not (code and processes):
            raise error
        failed = attempt(
            fits=False, peak_allocated_bytes=None, peak_reserved_bytes=None, reason=str(error), is_error=True
        )
        return Outcome(failed, None, error=error)  # another size may run

    def _execute(self, words: Sequence[str], folder: str, log: BinaryIO) -> int | None:
        """Run words with the recorder, and return their exit code; None if time was over."""
        fraction = fraction_of(self.device.budget_bytes, self.device.total_bytes)
        printed, end = log.tell(), time.monotonic() + self.seconds
        try:
            process = subprocess.Popen(
                words,
                env=recorded(folder, steps=STEPS, ends=True, fraction=fraction),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        except OSError as error:
            raise InputError(f"{words[0]} cannot be started: {error.strerror or error}") from error
        try:
            while process.returncode is None and time.monotonic() < end:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=LOOK_SECONDS)
                if self.echo is not None:
                    printed += len(text := os.pread(log.fileno(), 1 << 20, printed))
                    self.echo(text)
            return process.returncode
        finally:  # also on Ctrl-C
            _end(process, folder)

    def _ending(self, code: int | None, processes: Sequence[Process]) -> str:
        """Return how a run ended that took too few steps."""
        if code is None:
            return f"took no {STEPS} optimizer steps in {self.seconds} s (--seconds)"
        ending = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if not processes:
            return f"{ending}, and no process of it allocated memory of a GPU with torch"
        steps = max(process.steps for process in processes)
        return f"{ending} after {plural(steps, 'optimizer step')} of {STEPS}"


def _last_words(log: BinaryIO, since: int) -> str:
    """Return the last exception that the program printed, else its last lines, in one line."""
    log.seek(0, os.SEEK_END)
    log.seek(max(since, log.tell() - TAIL_BYTES))
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    raised = [line for line in lines if EXCEPTION.match(line)]
    return " | ".join(raised[-1:] or lines[-TAIL_LINES:]) or "nothing"


def _end(process: subprocess.Popen[bytes], folder: str) -> None:
    """Kill a process, its group, and what else has the folder of the recording in its environment."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    # Launchers start each rank in a session of its own.
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if folder.encode() in environment.read_bytes():
                os.kill(int(environment.parent.name), signal.SIGKILL)
