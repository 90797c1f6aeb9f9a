"""Torture of the product from outside: wrong inputs, damaged files, memory that runs out or grows, and kills.

python -m benchmarks.torture [--parts inputs damage memory growth late kills] [--seed 1] [--save]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.damages import damage_checkpoints
from benchmarks.injected_oom import inject_everywhere
from benchmarks.late_memory import growing_runs, late_runs
from benchmarks.report import save, surroundings
from benchmarks.wrong_inputs import ask, counts, wrong_inputs

Outcome = tuple[dict[str, dict[str, int]], list[str]]
"""Counts of what happened, by kind; and the faults, one per line."""


def torture_inputs(root: Path, given: argparse.Namespace) -> Outcome:
    """Ask every wrong input."""
    answers = []
    for index, asked in enumerate(wrong_inputs(given.number, given.seed)):
        folder = root / str(index)
        folder.mkdir()
        answers.append(ask(asked, folder))
    faults = []
    for answer in answers:
        if answer.faults:
            asked = answer.asked
            shown = (asked.words, asked.environ, {name: text[-300:] for name, text in asked.files.items()})
            faults.append(f"{', '.join(answer.faults)}: {str(shown)[:900]} {answer.err[:900]!r}")
    return {kind: dict(found) for kind, found in counts(answers).items()}, faults


def torture_files(root: Path, given: argparse.Namespace) -> Outcome:
    """Damage checkpoints."""
    with warnings.catch_warnings():
        # torch warns of the protocols of planted pickles.
        warnings.simplefilter("ignore", UserWarning)
        found, missed = damage_checkpoints(root, given.seed, given.flips)
    return _plain(found), missed


def torture_memory(root: Path, given: argparse.Namespace) -> Outcome:
    """Let memory run out at every operation, and at some of the check of the loss."""
    found, faults = inject_everywhere(root / "run", stride=given.stride)
    checked, more = inject_everywhere(root / "checked", stride=29 * given.stride, split_check="note")
    for phase, outcomes in checked.items():
        found.setdefault(phase, Counter()).update(outcomes)
    return _plain(found), [*faults, *more]


def torture_growth(root: Path, given: argparse.Namespace) -> Outcome:
    """Keep tensors from step to step, until memory runs out or for a while."""
    found, faults = growing_runs(root, given.seed, given.runs)
    return _plain(found), faults


def torture_late(root: Path, given: argparse.Namespace) -> Outcome:
    """Take more memory in a later step, or in the validation, than in the first steps."""
    found, faults = late_runs(root, given.seed, given.runs)
    return _plain(found), faults


def torture_kills(root: Path, given: argparse.Namespace) -> Outcome:
    """Kill runs with loader workers and averaged weights, at random instants."""
    words = ["-m", "tests.support.killing", str(root), str(given.kills), str(given.seed), "fed"]
    found = {"killed": 0, "finished": 0}
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            [sys.executable, *words],
            cwd=Path(__file__).parents[1],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as child:
            assert child.stdout is not None
            for line in child.stdout:
                found = json.loads(line)
                if found["killed"] % 20 == 0:
                    counted = f"{found['killed']} kills, {found['finished']} runs finished"
                    print(counted, file=sys.stderr, flush=True)
        errors.seek(0)
        lines = errors.read().strip().splitlines() or ["it ended without a message"]
    survived = {"survived": found["killed"], "runs with the same bits": found["finished"]}
    return {"SIGKILL": survived}, lines[-1:] if child.returncode else []


PARTS: dict[str, tuple[str, Callable[[Path, argparse.Namespace], Outcome]]] = {
    "inputs": ("random wrong inputs", torture_inputs),
    "damage": ("damaged checkpoints", torture_files),
    "memory": ("out-of-memory errors in a resumed run", torture_memory),
    "growth": ("memory that grows from step to step", torture_growth),
    "late": ("memory that a later step takes", torture_late),
    "kills": ("kills of a run with loader workers and averaged weights", torture_kills),
}


def main() -> int:
    """Run the parts, print the counts and the faults, and return 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--number", type=int, default=600, help="wrong inputs")
    parser.add_argument("--flips", type=int, default=1000, help="flipped bits")
    parser.add_argument("--stride", type=int, default=1, help="operations between two out-of-memory errors")
    parser.add_argument("--runs", type=int, default=20, help="runs of each kind whose memory changes")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", action="store_true", help="write the figures to benchmarks/results")
    given = parser.parse_args()
    faulty = 0
    for name in given.parts:
        content, start = surroundings(), time.perf_counter()
        with tempfile.TemporaryDirectory() as root:
            found, faults = PARTS[name][1](Path(root), given)
        part = {"counts": found, "faults": faults, "seconds": round(time.perf_counter() - start)}
        table = _table(name, part)
        print(table, flush=True)
        faulty += len(faults)
        if given.save:
            save(f"torture-{name}", content | {"options": vars(given), **part}, table)
    return int(faulty > 0)


def _plain(found: dict[str, Counter[str]]) -> dict[str, dict[str, int]]:
    return {kind: dict(outcomes) for kind, outcomes in found.items()}


def _table(name: str, part: dict[str, Any]) -> str:
    """Return the counts of a part, and its faults, in words."""
    lines = [f"{PARTS[name][0]}: {len(part['faults'])} faults, {part['seconds']} s", ""]
    for kind, outcomes in sorted(part["counts"].items()):
        found = ", ".join(f"{outcome}: {number}" for outcome, number in sorted(outcomes.items()))
        lines.append(f"- {kind}: {found}")
    return "\n".join([*lines, *(f"- FAULT {fault}" for fault in part["faults"])]) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
