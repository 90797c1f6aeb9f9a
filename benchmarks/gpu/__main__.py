"""All measurements on a GPU with one command, for a GPU that is here for minutes only.

    python -m benchmarks.gpu --out DIR [--minutes 9] [--part facts]

The measurements run in the order that yields the most per minute. Each is written to ``DIR/rows.jsonl`` as
soon as it ends. A failure is a row, too, and the next measurement follows, in a new process if the GPU's
context is lost or a measurement hangs. A second call with the same DIR continues: first what was never tried,
then what failed or was cut off. At the end, ``DIR/table.md`` sets every claim beside what was measured.

``python -m tests.stub_gpu -- python -m benchmarks.gpu …`` rehearses it without a GPU. ``python -m
benchmarks.gpu.keep DIR`` turns the results into fixtures of the tests and into figures of a profile.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu.claims import table
from benchmarks.gpu.work import CUT, FAILED, LOST, PARTS, Journal
from benchmarks.report import arguments


def main() -> int:
    """Measure until everything is tried or the time is over."""
    options = arguments(__doc__, out=Path("gpu"), minutes=9.0, part=PARTS)
    until = time.time() + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    journal = Journal(options.out)
    command = [sys.executable, "-m", "benchmarks.gpu.units", str(options.out)]
    command += ["--call", str(journal.call), "--until", str(until), "--part", *options.part]
    while measure(command, journal, until):
        pass
    text = table(journal.latest())
    (options.out / "table.md").write_text(text)
    print(text)
    return 0


def measure(command: list[str], journal: Journal, until: float) -> bool:
    """Run units in a process of their own, and return whether another process must go on."""
    before = len(journal.rows())
    # A group of its own, because a unit may start processes, too.
    process = subprocess.Popen(command, process_group=0)
    try:
        code = wait(process, journal, until)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    row = journal.unfinished()
    if row is not None and code is None:
        why = "the time was over" if time.time() >= until else "it took too long"
        journal.write(row["unit"], CUT, error=why)
    elif row is not None:
        journal.write(row["unit"], FAILED, error=f"the process ended with {code}")
    # A process that dies before its first unit would die again.
    return (code == LOST or row is not None) and len(journal.rows()) > before and time.time() < until


def wait(process: subprocess.Popen[bytes], journal: Journal, until: float) -> int | None:
    """Return the exit code of a process; None if the time is over, or its unit hangs."""
    while time.time() < until:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=min(1.0, max(0.0, until - time.time())))
        row = journal.unfinished()
        if row is not None and time.time() > row.get("until", until):
            return None
    return None


if __name__ == "__main__":
    sys.exit(main())
