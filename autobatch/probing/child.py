"""Attempts in a child process: what a probe breaks, it breaks there.

The search stays here and asks the child for one attempt at a time. A child that is killed while the host runs
out of memory is an answer (that size does not fit, and a new child serves the next one); a child that crashes
or hangs is a clear error with what it wrote.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec

from autobatch.core.errors import AutobatchError
from autobatch.core.options import Options
from autobatch.core.records import Attempt, Remedy
from autobatch.footprint.predict import Footprint
from autobatch.footprint.program import Program
from autobatch.probing.attempt import Outcome, TrainSetup, attempt_at
from autobatch.probing.limits import other_order, remedies_of, trace_footprint, traced_peak
from autobatch.probing.setup import SetupInfo, describe_setup, find_workload, open_setup
from autobatch.workload.contract import Workload
from autobatch.workload.user_code import to_picklable

PRIOR = "prior"


OTHER_ORDER = "other order"


TRACED = "traced peak"


OTHERS = "others"
"""Asks the child for a prediction instead of an attempt."""


REMEDIES = "remedies"
"""Asks it for what would help."""


ANSWER_SECONDS = 600.0
"""How long one attempt may take before the child counts as hung."""


PATIENCE_SECONDS = 2.0
"""How long a child that is no longer needed may take to leave by itself."""


TAIL_LINES = 5
"""Lines of what a child wrote that its epitaph quotes."""


OOM_COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))
"""Where Linux counts such kills: of a container's control group (version 2), and of the whole machine."""


Answers = Callable[[TrainSetup, Options], Callable[[Any], Any]]


class ChildCrashed(AutobatchError, RuntimeError):  # noqa: N818 - what became of it, not what went wrong
    """A child process crashed or hung; the message says how, and what it wrote."""


class ProbeChild:
    """A process that makes attempts on a workload.

    Args:
        reference: the workload, as ``module:function`` or ``path.py:function``; ``None``: the demo.
        options: what the bench is opened with.
        answers: makes of a bench what answers, in the child; a function of a module.
        answer_seconds: how long the child may take for one answer.
        oom_kills: reads how many processes the host has killed for want of memory.
    """

    def __init__(
        self,
        reference: str | None,
        options: Options,
        *,
        answers: Answers | None = None,
        answer_seconds: float = ANSWER_SECONDS,
        oom_kills: Callable[[], int] | None = None,
    ) -> None:
        self._reference = reference
        self._options = options
        self._answers = answers or probe_answers
        self._answer_seconds = answer_seconds
        self._oom_kills = oom_kills or count_oom_kills
        self.facts: SetupInfo
        self.step: Footprint | None = None

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # Nobody waits for the end of an attempt after Ctrl-C.
        self.close(patience=PATIENCE_SECONDS if kind is None else 0.0)

    def close(self, *, patience: float = PATIENCE_SECONDS) -> None:
        """End the child, and forget what it wrote."""
        self._stop(patience=patience)
        self._log.close()

    def run(self, micro_batch: int, level: float | None = None) -> Outcome:
        """Make one attempt in the child; see `autobatch.probing.attempt.attempt_at`.

        Raises:
            InputError: the workload raised in the child.
            AutobatchError: the child crashed or hung.
        """
        kills = self._oom_kills()
        started = time.perf_counter()
        try:
            self._connection.send((micro_batch, level))
            outcome: Outcome = self._receive(f"an attempt at a micro-batch of {micro_batch}")
        except (EOFError, BrokenPipeError, ConnectionResetError):
            code = self._stop()
            if code == -signal.SIGKILL and self._oom_kills() > kills:
                self._log.close()
                self._start()
                return Outcome(_killed(micro_batch, time.perf_counter() - started), None)
            raise AutobatchError(self._crash_message(code, f"at a micro-batch of {micro_batch}")) from None
        return outcome

    def trace_footprint(self) -> Footprint | None:
        """What is predicted before anything runs; a child that tracing has crashed is replaced.

        Raises:
            AutobatchError: the child hung.
        """
        try:
            self._connection.send(PRIOR)
            self.step = self._receive("predicting the footprint")
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self.close()
            self._start()
            return None
        return self.step

    def other_order(self) -> Program | None:
        """What is predicted of the second look of an attempt; see `autobatch.probing.limits.other_order`."""
        found: Program | None = self._ask_or_none(OTHER_ORDER, "predicting the footprint")
        return found

    def others_bytes(self) -> int | None:
        """What other processes hold on the card now; ``None`` where that cannot be read."""
        if self.facts.device.other_processes_bytes is None:
            return None
        found: int | None = self._ask_or_none(OTHERS, "reading the card")
        return found

    def traced_peak(self, micro_batch: int) -> int | None:
        """What a trace alone predicts on a card; see `autobatch.probing.limits.traced_peak`."""
        if self.facts.compute_capability is None:
            return None
        found: int | None = self._ask_or_none((TRACED, micro_batch), "predicting the footprint")
        return found

    def remedies(self) -> list[Remedy]:
        """What would let a micro-batch fit that does not, as predicted."""
        return self._ask_or_none(REMEDIES, "looking for what would help") or []

    def _ask_or_none(self, message: Any, what: str) -> Any:
        """An answer that can be done without; a child that was lost over it is replaced."""
        try:
            return self.ask(message, what)
        except ChildCrashed:
            self.restart()
        except AutobatchError:
            pass
        return None

    def ask(self, message: Any, what: str) -> Any:
        """Have the child answer a message.

        Args:
            message: what its answering function is called with.
            what: what it does, for people.

        Raises:
            ChildCrashed: it crashed, or gave no answer in time; `restart` starts another.
            AutobatchError: what the child raised.
        """
        try:
            self._connection.send(message)
            return self._receive(what)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise ChildCrashed(self._crash_message(self._stop(), f"during {what}")) from None

    def restart(self) -> None:
        """Replace the child by a new one."""
        self.close(patience=0.0)
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._log = tempfile.NamedTemporaryFile(prefix="autobatch-probe-", suffix=".log")  # noqa: SIM115
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=serve,
            args=(theirs, self._reference, self._options, self._log.name, self._answers),
            daemon=True,
        )
        with _hold_back_interrupts():
            self._process.start()
        theirs.close()
        try:
            self.facts = self._receive("opening the workload")
        except (EOFError, ConnectionResetError):
            raise AutobatchError(self._crash_message(self._stop(), "while it opened the workload")) from None

    def _receive(self, what: str) -> Any:
        """Wait for an answer; a Ctrl-C ends the waiting here, the child ignores it."""
        deadline = time.monotonic() + self._answer_seconds
        while not self._connection.poll(max(0.0, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                self._stop(patience=0.0)
                raise ChildCrashed(
                    f"the probe's process gave no answer in {self._answer_seconds:.0f} s during {what}, "
                    f"and was ended; it wrote: {self._tail()}"
                )
        kind, content = self._connection.recv()
        if kind == "error":
            raise content
        return content

    def _stop(self, *, patience: float = PATIENCE_SECONDS) -> int | None:
        """End the child, which leaves by itself when the pipe closes; returns its exit code."""
        with suppress(OSError):
            self._connection.close()
        self._process.join(timeout=patience)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        return self._process.exitcode

    def _crash_message(self, code: int | None, when: str) -> str:
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = signal.Signals(-code).name
        advice = ""
        if code == -signal.SIGKILL:
            advice = (
                "; where the host ran out of memory, a smaller --memory-budget or --max-micro-batch helps"
            )
        return f"the probe's process ended {when} ({how}); it wrote: {self._tail()}{advice}"

    def _tail(self) -> str:
        """What the child wrote last, in one line; of a crash, where it happened."""
        with suppress(OSError):
            lines = Path(self._log.name).read_text(errors="replace").strip().splitlines()
            crash = next((n for n, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
            if crash is None:
                return " | ".join(line.strip() for line in lines[-TAIL_LINES:]) or "nothing"
            frames = [line.strip() for line in lines[crash + 1 :] if line.startswith("  File ")]
            return " | ".join([lines[crash], *frames[:TAIL_LINES]])
        return "nothing"


def probe_answers(setup: TrainSetup, _: Options) -> Callable[[Any], Any]:
    """What a child for a probe does with what it is asked: a micro-batch and a level, or for a prediction."""
    step: Footprint | None = None

    def answer(asked: Any) -> Any:
        nonlocal step
        if asked == PRIOR:
            step = trace_footprint(setup)
            return step
        if asked == OTHER_ORDER:
            return other_order(setup)
        if asked == OTHERS:
            return setup.device.describe().other_processes_bytes
        if asked == REMEDIES:
            return remedies_of(setup, step)
        what, size = asked
        return traced_peak(setup, size) if what == TRACED else attempt_at(setup, *asked)

    return answer


def serve(
    connection: Connection, reference: str | None, options: Options, log: str, answers: Answers
) -> None:
    """The child: open the workload, then answer one message after the other until the pipe closes."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    # By the line: what was written before a crash must not be lost in a buffer.
    sys.stdout = sys.stderr = os.fdopen(os.dup(descriptor), "w", buffering=1, errors="replace")
    faulthandler.enable(descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Trials start loader workers, which a daemon may not; those end with this process all the same.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    try:
        setup = open_setup(find_workload(reference), options, demo=reference is None)
        connection.send(("facts", describe_setup(setup)))
        answer = answers(setup, options)
        while True:
            connection.send(("answer", answer(connection.recv())))
    except (EOFError, BrokenPipeError):
        return
    except (Exception, SystemExit) as error:
        connection.send(("error", to_picklable(error)))


@contextmanager
def _hold_back_interrupts() -> Iterator[None]:
    """Inside, a Ctrl-C waits; a process that is started here never sees one."""
    # Started here, for it lifts the block when it starts by itself.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def count_oom_kills(files: Sequence[Path] = OOM_COUNTERS) -> int:
    """How many processes were killed for want of memory: by this control group, and on this machine.

    Args:
        files: lines of a name and a count each, ``oom_kill`` among them; those that are absent count nothing.
    """
    kills = 0
    for file in files:
        with suppress(OSError, ValueError):
            for line in file.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    kills += int(value)
    return kills


def _killed(micro_batch: int, seconds: float) -> Attempt:
    return Attempt(
        micro_batch=micro_batch,
        fits=False,
        peak_allocated_bytes=None,
        peak_reserved_bytes=None,
        seconds=seconds,
        reason="the host ran out of memory and ended the probe's process",
    )


SPILL_FACTOR = 3.0
"""A size that takes this much longer a sample than the fastest is not running in the card's own memory."""


class SpillGuard:
    """Refuses sizes that run, but several times slower a sample: some drivers spill to the host's memory.

    Only of larger sizes than ran well: smaller ones are slower a sample for what comes once a window, such as
    a loss over all of it.

    Args:
        active: whether this device's driver might.
    """

    def __init__(self, *, active: bool) -> None:
        self._active = active
        self._best: float | None = None
        self._largest = 0

    def judge(self, outcome: Outcome) -> Outcome:
        """The outcome, or the same as one that does not fit."""
        attempted = outcome.attempt
        if not (self._active and attempted.fits and attempted.step_seconds):
            return outcome
        a_sample = attempted.step_seconds / attempted.micro_batch
        is_larger = attempted.micro_batch > self._largest
        if self._best is None or not is_larger or a_sample <= SPILL_FACTOR * self._best:
            self._best = a_sample if self._best is None else min(self._best, a_sample)
            self._largest = max(self._largest, attempted.micro_batch)
            return outcome
        reason = (
            f"it runs, at {a_sample / self._best:.1f} times the best time a sample: the driver seems to "
            "spill to the host's memory instead of failing"
        )
        return Outcome(msgspec.structs.replace(attempted, fits=False, reason=reason), None)


class Prober(Protocol):
    """Makes attempts, here or in a child process."""

    facts: SetupInfo
    step: Footprint | None
    """What `trace_footprint` answered; ``None`` before."""

    def trace_footprint(self) -> Footprint | None:
        """What is predicted before anything runs, where it can be."""

    def other_order(self) -> Program | None:
        """What is predicted of the second look that an attempt takes near the limit, where it can be."""

    def others_bytes(self) -> int | None:
        """What other processes hold on the card now; ``None`` where that cannot be read."""

    def traced_peak(self, micro_batch: int) -> int | None:
        """Peak reserved as a trace alone predicts it, where the device is a card that runs have measured."""

    def remedies(self) -> list[Remedy]:
        """What would let a micro-batch fit that does not, as predicted."""

    def run(self, micro_batch: int, level: float | None = None) -> Outcome:
        """Make one attempt, on samples that cost no more than ``level`` if that is given."""


@dataclass
class LocalProber:
    """Attempts in this process."""

    setup: TrainSetup
    facts: SetupInfo
    step: Footprint | None = None

    def trace_footprint(self) -> Footprint | None:
        """See `autobatch.probing.limits.trace_footprint`."""
        self.step = trace_footprint(self.setup)
        return self.step

    def other_order(self) -> Program | None:
        """See `autobatch.probing.limits.other_order`."""
        return other_order(self.setup)

    def others_bytes(self) -> int | None:
        """See `Prober`."""
        return self.setup.device.describe().other_processes_bytes

    def traced_peak(self, micro_batch: int) -> int | None:
        """See `autobatch.probing.limits.traced_peak`."""
        return traced_peak(self.setup, micro_batch)

    def remedies(self) -> list[Remedy]:
        """See `autobatch.probing.limits.remedies_of`."""
        return remedies_of(self.setup, self.step)

    def run(self, micro_batch: int, level: float | None = None) -> Outcome:
        """See `autobatch.probing.attempt.attempt_at`."""
        return attempt_at(self.setup, micro_batch, level)


@contextmanager
def open_prober(workload: Workload | str | None, options: Options, *, isolated: bool) -> Iterator[Prober]:
    """Open what makes the attempts: a child process where a reference can be handed to one, else here."""
    if isolated and not isinstance(workload, Workload):
        with ProbeChild(workload, options) as child:
            yield child
        return
    setup = open_setup(find_workload(workload), options, demo=workload is None)
    yield LocalProber(setup, describe_setup(setup))
