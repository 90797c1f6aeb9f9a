"""Torture of the product from outside: wrong inputs, damaged files, memory that runs out, and kills.

python -m benchmarks.torture [--parts inputs damage forged calls memory late kills] [--save]

``--number`` wrong inputs, ``--flips`` of bits, ``--runs`` of each kind whose memory changes, and ``--kills``;
``--stride`` is from one operation, call or forgery to the next.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from benchmarks.damages import damage_checkpoints, forge_checkpoints
from benchmarks.injected_calls import fail_everywhere
from benchmarks.injected_oom import inject_everywhere
from benchmarks.late_memory import late_runs
from benchmarks.report import Findings, arguments, save
from benchmarks.wrong_inputs import ask_all


def kill(root: Path, kills: int, seed: int) -> Findings:
    """Kill runs with loader workers and averaged weights, at random instants."""
    words = ["-m", "tests.support.killing", str(root), str(kills), str(seed), "fed"]
    ran = subprocess.run(
        [sys.executable, *words], cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False
    )
    findings = Findings()
    for last in ran.stdout.splitlines()[-1:]:
        found = json.loads(last)
        for outcome, count in (("survived", "killed"), ("runs with the same bits", "finished")):
            for _ in range(found[count]):
                findings.add("SIGKILL", outcome)
    if ran.returncode:
        findings.add("SIGKILL", "lost", (ran.stderr.strip().splitlines() or ["no message"])[-1])
    return findings


Part = Callable[[Path, argparse.Namespace], Findings]
PARTS: dict[str, tuple[str, Part]] = {
    "inputs": ("random wrong inputs", lambda root, given: ask_all(root, given.number, given.seed)),
    "damage": ("damaged checkpoints", lambda root, given: damage_checkpoints(root, given.seed, given.flips)),
    "forged": (
        "forged checkpoints with right sums",
        lambda root, given: forge_checkpoints(root, given.stride),
    ),
    "calls": (
        "failing calls of the system in a resumed run",
        lambda root, given: fail_everywhere(root, given.stride),
    ),
    "memory": (
        "out-of-memory errors in a resumed run",
        lambda root, given: inject_everywhere(root, stride=given.stride),
    ),
    "checked": (
        "the same with the check of the loss, at every 29th operation",
        lambda root, given: inject_everywhere(root, stride=29 * given.stride, split_check="note"),
    ),
    "late": ("memory that a later step takes", lambda root, given: late_runs(root, given.seed, given.runs)),
    "kills": (
        "kills of a run with loader workers and averaged weights",
        lambda root, given: kill(root, given.kills, given.seed),
    ),
}


def main() -> int:
    """Run the parts, print the counts and the faults, and return 1 if there are any."""
    given = arguments(
        __doc__, parts=[*PARTS], number=600, flips=1000, stride=1, runs=20, kills=200, seed=1, save=False
    )
    # torch warns of the protocols of planted pickles.
    warnings.simplefilter("ignore", UserWarning)
    faulty = 0
    for name in given.parts:
        about, attack = PARTS[name]
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as root:
            found = attack(Path(root), given)
        seconds = round(time.perf_counter() - start)
        lines = [f"{about}: {len(found.faults)} faults, {seconds} s", ""]
        for kind, outcomes in sorted(found.counts.items()):
            counts = ", ".join(f"{outcome}: {number}" for outcome, number in sorted(outcomes.items()))
            lines.append(f"- {kind}: {counts}")
        table = "\n".join([*lines, *(f"- FAULT {fault}" for fault in found.faults)]) + "\n"
        print(table, flush=True)
        faulty += len(found.faults)
        if given.save:
            save(f"torture-{name}", table, seed=given.seed)
    return int(faulty > 0)


if __name__ == "__main__":
    raise SystemExit(main())
