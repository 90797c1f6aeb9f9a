"""The largest size at which a program runs that has no `Workload`, and its plan of equal micro-batches.

The program runs as it is, up to its third optimizer step, and records what it takes (see
`autobatch.integrations.recorder`), also in the ranks that a launcher starts. All of them must fit. The events
of the one that reserves most count.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from autobatch.core.errors import DoesNotFitError, InputError
from autobatch.core.options import Options
from autobatch.core.progress import Progress
from autobatch.core.records import Attempt, DeviceRecord, LimitedBy
from autobatch.core.units import format_bytes
from autobatch.device.allocator import CachingAllocator
from autobatch.device.cuda import TAKES_LOWEST, allocator_options, fraction_of
from autobatch.device.oom import is_below_budget
from autobatch.device.select import open_device
from autobatch.device.trace import Recording, read_recordings
from autobatch.estimates.copies import run_in_copies
from autobatch.integrations.recorder.autobatch_recorder import recorded
from autobatch.planning import equal_parts_note, program_plan
from autobatch.rehearsal.rehearsal import Outcome
from autobatch.rehearsal.setup import KeyValue
from autobatch.report.result import Result
from autobatch.search.find_limit import reported, search_from_saved
from autobatch.search.probe import find_largest

STEPS = 3
"""Optimizer steps of a run: state appears in the first, and later ones find it and the gradients there."""
MOST = 1 << 20
"""Samples of the largest micro-batch that is tried."""
EXCEPTION = re.compile(r"(\[rank\d+\]: )?(?!subprocess\.)[A-Za-z_.]+(Error|Exception|Interrupt|Exit)(: .+)?$")
"""Last line of a traceback, but for those of launchers: that of torchrun ends in a colon, and those of
accelerate and DeepSpeed tell of a ``subprocess``."""


def fill(command: Sequence[str], size: int, steps: int, world: int) -> list[str]:
    """Return a command line for a size, a number of micro-batches of each rank in a step, and of ranks."""
    values = {"{}": size, "{steps}": steps, "{total_steps}": steps * world}
    return [re.sub("{(total_steps|steps)?}", lambda place: str(values[place[0]]), word) for word in command]


@dataclass
class Runner:
    """Runs of a command at sizes, within a budget."""

    command: Sequence[str]
    """Its words, with the places that `fill` fills."""
    device: DeviceRecord
    """The GPU, and the bytes that the allocator of each process may hold."""
    seconds: float
    """Time for the steps of a run."""
    log: Path
    """Receives what the program prints."""
    is_shown: bool
    """True to print that on standard error after each run."""
    progress: Progress
    """Receives each run."""
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    """Of the runs, by size."""
    world: int = 8
    """Ranks of the program; until one has run, the number for which all have micro-batches."""
    recording: Recording | None = None
    """That of the latest run that fits."""
    is_repeatable: bool = False
    """True once a size that had fitted has run again, after a larger one had failed."""

    def run(self, size: int) -> Outcome:
        """Run the command at a size, again if something else than the budget refused memory.

        Raises:
            InputError: it cannot be started. Or no size has fitted, and it takes no such step for another
                reason than memory. Or the size changes nothing.
        """
        outcome = self.outcomes.setdefault(size, reported(partial(self._attempt, size), self.progress))
        if outcome.attempt.is_error and not self.is_repeatable:
            fitted = max(size for size, known in self.outcomes.items() if known.attempt.fits)
            again = self._attempt(fitted).attempt
            if again.is_error:
                raise InputError(
                    f"the command ran at the size {fitted:,}, and no longer does, so it keeps something from "
                    f"run to run, such as a folder or a checkpoint: {again.reason}"
                )
            self.is_repeatable = True
        return outcome

    def _attempt(self, size: int) -> Outcome:
        """Run the command once, until its optimizer has taken `STEPS` steps."""
        # With two micro-batches in a step, a command that accumulates finds gradients in the second.
        words, start = fill(self.command, size, 2, self.world), time.monotonic()
        self.progress.doing(f"running {shlex.join(words)}")
        error, reason, recording = None, None, None
        with tempfile.TemporaryDirectory(prefix="autobatch-") as folder:
            code, last_words = self._execute(words, folder)
            processes = [json.loads(file.read_bytes()) for file in Path(folder).glob("*.json")]
            ranks = [process for process in processes if process["steps"]]
            budget = self.device.budget_bytes
            refused = [each for each in processes if each["retries"] or each["peak_reserved_bytes"] > budget]
            by_need = sorted(refused or ranks, key=lambda of: of["peak_reserved_bytes"] + of["refused_bytes"])
            most: dict[str, Any] = by_need[-1] if by_need else {}
            if refused:
                reason = f"out of memory, after holding {format_bytes(most['peak_reserved_bytes'])}"
            elif code == 0 and most.get("peak_reserved_bytes") and all(r["steps"] >= STEPS for r in ranks):
                recording = read_recordings(Path(most["snapshot"]))[0]
            else:
                # A process that is killed, or ends itself by os._exit, has recorded nothing.
                is_unused = isinstance(code, int) and not any(
                    each["peak_reserved_bytes"] for each in processes
                )
                hint = ", and torch is not known to have used a GPU" if is_unused else ""
                error = InputError(
                    f"{shlex.join(words)} took {max([0, *(each['steps'] for each in processes)])} of {STEPS} "
                    f"optimizer steps{hint}, exit code {code}. Its last words, in {self.log}: {last_words}"
                )
        if error is not None and self.recording is None:
            raise error
        if recording is not None:
            for other, outcome in self.outcomes.items():
                if other != size and recording.trace == outcome.trace:
                    raise InputError(
                        f"the command allocates the same memory at the sizes {other:,} and {size:,}: "
                        f"{shlex.join(self.command)}. Put {{}} where the size of its micro-batch goes. If "
                        "that has a bound (a cap, few samples), give it as --max-micro-batch"
                    )
            self.recording, self.world = recording, len(ranks)
        held = most.get("peak_reserved_bytes")
        attempt = Attempt(
            micro_batch=size,
            seconds=time.monotonic() - start,
            fits=recording is not None,
            peak_allocated_bytes=most.get("peak_allocated_bytes"),
            peak_reserved_bytes=held,
            reason=str(error) if error else reason,
            is_error=error is not None,
            is_below_budget=is_below_budget(held, most.get("refused_bytes"), budget),
        )
        return Outcome(attempt, None if recording is None else recording.trace, error=error)

    def _execute(self, words: Sequence[str], folder: str) -> tuple[int | str, str]:
        """Run words; return their exit code, in words if time was over, and what the program said last."""
        fraction = fraction_of(self.device.budget_bytes, self.device.total_bytes)
        environ = recorded(folder=folder, steps=STEPS, fraction=fraction)
        code: int | str = f"none within {self.seconds:g} s (--seconds)"
        with self.log.open("ab") as log, suppress(subprocess.TimeoutExpired):
            begin = log.tell()
            try:
                code = subprocess.run(
                    words, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    timeout=self.seconds, check=False,
                ).returncode  # fmt: skip
            except OSError as error:
                raise InputError(f"{words[0]} cannot be started: {error.strerror or error}") from error
            finally:
                # A launcher starts ranks in sessions of their own. All have the folder in their environment.
                for environment in Path("/proc").glob("[0-9]*/environ"):
                    with suppress(OSError):
                        if folder.encode() in environment.read_bytes():
                            os.kill(int(environment.parent.name), signal.SIGKILL)
        printed = self.log.read_bytes()[begin:].decode(errors="replace")
        if self.is_shown:
            sys.stderr.write(printed)
        lines = [line.strip() for line in printed.splitlines() if line.strip()]
        raised = [line for line in lines if EXCEPTION.match(line)]
        return code, " | ".join(raised[-1:] or lines[-3:]) or "nothing"

    def new_allocator(self) -> CachingAllocator:
        """Return an empty model of the allocator, limited to the budget."""
        known = self.recording
        falls = TAKES_LOWEST and known is not None and known.falls
        is_expandable = known is not None and known.is_expandable
        return CachingAllocator(self.device.budget_bytes, is_expandable, falls=falls)


def describe_gpu(memory_budget: str | int | None) -> DeviceRecord:
    """Return the first GPU and its budget. A copy of this process reads it, which keeps no context there.

    Raises:
        InputError: there is no GPU, or the budget exceeds its memory.
    """
    return run_in_copies([lambda: open_device("cuda", memory_budget).describe()])[0]


def find_limit(runner: Runner, options: Options, *, home: Path) -> Result:
    """Find the largest micro-batch at which a command runs, and plan its target batch if there is one.

    Args:
        runner: runs the command.
        options: the caps, the multiple and the target batch.
        home: data directory, in which answers are saved, by the command and the files that it names.

    Raises:
        DoesNotFitError: not even the smallest micro-batch fits.
        InputError: the command takes no optimizer step, or its ranks cannot share the target batch equally.
    """
    device, outcomes = runner.device, runner.outcomes
    multiple, target = options.micro_batch_multiple, options.target_batch
    caps: dict[LimitedBy, int | None] = {"max_micro_batch": options.max_micro_batch, "target_batch": target}
    caps["memory"] = MOST
    files = hashlib.sha256()
    for part in [part for word in runner.command for part in re.split("[=,]", word)]:
        with suppress(OSError, ValueError):
            if Path(part).stat().st_size < 1 << 26:  # larger ones are data
                files.update(Path(part).read_bytes())
    key: dict[str, KeyValue] = {
        "workload": f"-- {shlex.join(runner.command)}",
        "files": files.hexdigest()[:16],
        "folder": os.getcwd(),
        "device": device.name,
        "budget_bytes": device.budget_bytes,
        "allocator": allocator_options(os.environ) or None,
    }
    search = partial(find_largest, runner.run, caps, runner.new_allocator, multiple=multiple)
    found = search_from_saved(search, key, home, runner.progress)
    if not (limit := found.probe.micro_batch):
        smallest = outcomes[min(outcomes)].attempt
        raise DoesNotFitError(
            f"a micro-batch of {smallest.micro_batch} does not fit in the budget of "
            f"{format_bytes(device.budget_bytes)}: {smallest.reason}. What helps: a larger --memory-budget, "
            "or flags with which it takes less. autobatch record and estimate --snapshot show what takes it"
        )
    if found.probe.source == "search" and len(outcomes) == 1:
        runner.progress.note("one size alone ran, so whether {} is that of its micro-batch is not known")
    plan = None
    if target is not None:
        plan = program_plan(target, limit, world_size=runner.world, multiple=multiple)
        # A smaller size may need more, because the allocator cuts its memory in another way.
        while (size := plan.micro_batch) > 1 and not (outcomes.get(size) or runner.run(size)).attempt.fits:
            plan = program_plan(target, size - 1, world_size=runner.world, multiple=multiple)
        if (note := equal_parts_note(plan, limit)) is not None:
            runner.progress.note(note)
    return Result(device=device, probe=found.probe, plan=plan, profile=found.file)
