"""Torture of the product from outside: wrong inputs, damaged files, memory that runs out or grows, and kills.

python -m benchmarks.torture [--parts inputs damage forged calls memory growth late kills promises] [--save]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import warnings
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.damages import damage_checkpoints, forge_checkpoints
from benchmarks.injected_calls import fail_everywhere
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


def torture_forgeries(root: Path, given: argparse.Namespace) -> Outcome:
    """Forge checkpoints and seal them again."""
    found, faults = forge_checkpoints(root, given.stride)
    return _plain(found), faults


def torture_calls(root: Path, given: argparse.Namespace) -> Outcome:
    """Let every call of the system fail that a run makes on its files."""
    found, faults = fail_everywhere(root, given.stride)
    return _plain(found), faults


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


PROMISES = {
    "errors that are out of memory are told from all others, real ones included": ["device/test_oom.py"],
    "a probe leaves models, optimizers, data and generators as they were": [
        *("setup/test_attempt.py", "step/test_restore.py"),
    ],
    "a limit leaves room for what the second step takes": [
        "scenarios/test_probed_limits.py::test_a_limit_leaves_room_for_state_that_the_first_step_makes",
        "scenarios/test_probed_limits.py::test_a_size_that_runs_in_one_order_of_steps_only_does_not_fit",
    ],
    "at no call of the system are fewer checkpoints valid than are kept": [
        "scenarios/test_failed_saves.py::test_at_no_call_of_the_system_are_fewer_valid_checkpoints_than_are_kept",
        "scenarios/test_failed_saves.py::test_a_kill_between_any_two_calls_leaves_the_newest_checkpoint_valid",
        "training/test_checkpoint.py::test_the_checkpoint_of_the_resume_is_not_deleted",
    ],
    "a search finds a proven limit in few runs, whatever memory does": [
        *("core/test_largest.py", "search/test_search.py", "search/test_attempts.py"),
    ],
    "a child that is killed, crashes, hangs or writes garbage is an answer or one line": [
        "setup/test_child.py",
    ],
    "a batch is reduced once over the ranks, and exactly": ["distributed/test_engine.py"],
    "forty out-of-memory errors leave nothing behind": [
        "setup/test_attempt.py::test_forty_out_of_memory_errors_leave_nothing_behind",
        "scenarios/test_recovery.py::test_forty_recoveries_leak_no_tensor",
    ],
    "a driver's library that is absent, old, lost or split changes no budget": [
        *("device/test_nvml.py", "device/test_cuda.py"),
    ],
    "a budget is what its text says, or an error": [
        *("core/test_units.py", "device/test_cpu.py", "device/test_host.py", "device/test_select.py"),
        "search/test_find_limit.py::test_a_growth_of_other_processes_is_noted",
    ],
    "studies survive kills and refusals, repeat with their seed, and never choose what does not fit": [
        *("tuning/test_study.py", "tuning/test_find_fastest.py"),
        "tuning/test_trial.py::test_a_configuration_that_never_fits_is_infeasible",
        "tuning/test_trial.py::test_a_child_runs_trials_and_short_runs_and_one_that_crashes_it_is_infeasible",
    ],
    "data that differ between ranks or end on one are refused, and short batches are exact": [
        *("integrations/test_own_loop_over_ranks.py", "distributed/test_shared_stream.py"),
    ],
}
"""Tests of what no random attack can count, by what they hold."""


def torture_promises(root: Path, given: argparse.Namespace) -> Outcome:
    """Run the tests of each promise."""
    report, tests = (
        root / "report.xml",
        sorted({f"tests/{one}" for tests in PROMISES.values() for one in tests}),
    )
    words = [
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "-m",
        "not gpu and not slow",
        f"--junitxml={report}",
        *tests,
    ]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    faults = re.findall(r"^(?:FAILED|ERROR) .*", ran.stdout, re.MULTILINE)
    if ran.returncode and not faults:
        faults.append(f"pytest ended with {ran.returncode}: {(ran.stdout + ran.stderr)[-900:]!r}")
    found = {promise: Counter[str]() for promise in PROMISES}
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        place = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name', '').partition('[')[0]}"
        outcome = next((part.tag for part in case if part.tag in ("failure", "error", "skipped")), "passed")
        for promise, held in PROMISES.items():
            found[promise][outcome] += any(place.startswith(f"tests/{one}") for one in held)
    return _plain({promise: +outcomes for promise, outcomes in found.items()}), faults


PARTS: dict[str, tuple[str, Callable[[Path, argparse.Namespace], Outcome]]] = {
    "inputs": ("random wrong inputs", torture_inputs),
    "damage": ("damaged checkpoints", torture_files),
    "forged": ("forged checkpoints with right sums", torture_forgeries),
    "calls": ("failing calls of the system in a resumed run", torture_calls),
    "memory": ("out-of-memory errors in a resumed run", torture_memory),
    "growth": ("memory that grows from step to step", torture_growth),
    "late": ("memory that a later step takes", torture_late),
    "kills": ("kills of a run with loader workers and averaged weights", torture_kills),
    "promises": ("tests of what no random attack can count", torture_promises),
}


def main() -> int:
    """Run the parts, print the counts and the faults, and return 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--number", type=int, default=600, help="wrong inputs")
    parser.add_argument("--flips", type=int, default=1000, help="flipped bits")
    parser.add_argument("--stride", type=int, default=1, help="operations, calls or forgeries to the next")
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
