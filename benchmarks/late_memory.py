"""Memory that changes while a run trains: it grows from step to step, or a later step takes more of it.

All runs train on simulated GPUs, whose budgets are drawn at random, and which raise what a GPU would.
"""

from __future__ import annotations

import random
import re
import shutil
from collections import Counter
from pathlib import Path

from autobatch import DoesNotFitError, RestartSmallerError
from autobatch.core.units import KiB, MiB
from autobatch.device.profiles import load_profile
from autobatch.device.simulated import SimulatedDevice
from tests.support.late import Heard, Held, late_workload, trained
from tests.support.runs import rows

TOLERANCE = 1e-12
"""Relative error of weights in float64 after other micro-batches."""
FORETOLD_WITHIN = 0.2
STEPS = 300
KEPT = "kept at every step", "kept from a late step on", "a list that is emptied", "a cache that fills"
LATE = {
    "longer samples": [(64, 2 * MiB)],
    "a layer": [(32, 2 * MiB), (64, 4 * MiB)],
    "validation": [(32, 2 * MiB), (64, 4 * MiB)],
}
"""Micro-batches and budgets that the first steps fit in, by what comes late."""
NEVER = 1 << 30
REPEATED = re.compile(r"^step (\d+): out of memory, repeated at micro-batch ")
FOUND = re.compile(r"^memory grows by .* full at about step ([\d,]+)\.")


def growing_runs(root: Path, seed: int, number: int) -> tuple[dict[str, Counter[str]], list[str]]:
    """Train runs whose code keeps tensors, and runs whose code keeps as many for a while only.

    Args:
        root: an empty folder.
        seed: draws rates, steps and budgets.
        number: runs of each kind.

    Returns:
        Counts of what was told by kind, and what was wrong.
    """
    draws, counts, faults = random.Random(seed), dict[str, Counter[str]](), list[str]()
    for index in range(len(KEPT) * number):
        kind = KEPT[index % len(KEPT)]
        budget, heard = draws.randint(12, 48) * MiB, Heard()
        held = _course(kind, draws, budget)
        device = SimulatedDevice(load_profile("rtx-4090", user_dir=root), memory_budget=budget)
        out = root / str(index)
        try:
            trained(late_workload("", NEVER, held), out, heard, steps=STEPS, device=device)
            said, has_ended = " ".join(heard.notes), False
        except (DoesNotFitError, RestartSmallerError) as error:
            said, has_ended = "; ".join([str(error), *error.__notes__]), True
        # The budget is full where memory first ran out.
        metrics = rows(out)
        full = next((row["step"] for row in metrics if row["recovered"]), metrics[-1]["step"] + 1)
        told = [FOUND.match(one) for one in heard.notes if one.startswith("memory grows")]
        if not kind.startswith("kept"):
            outcome = "FAULT: told" if said else "nothing told, no end"
        elif "memory grew by" not in said:
            outcome = f"FAULT: no cause in {said[-200:]!r}"
        elif not has_ended:
            outcome = "finished in smaller micro-batches, with the cause told"
        else:
            outcome = _judge(told, full)
        counts.setdefault(kind, Counter())[outcome.partition(":")[0]] += 1
        if outcome.startswith("FAULT"):
            faults.append(f"run {index}, {kind}, {budget:,} bytes: {outcome}")
        shutil.rmtree(out)
    return counts, faults


def _course(kind: str, draws: random.Random, budget: int) -> Held:
    """Return the bytes that are held after each step."""
    room = budget - 4 * MiB
    if kind == "a cache that fills":
        most, steps = draws.uniform(0.01, 0.1) * room, draws.randint(20, STEPS)
        return lambda step: round(min(1.0, step / steps) * most)
    if kind == "a list that is emptied":
        most, steps = draws.uniform(0.01, 0.1) * room, draws.randint(3, 60)
        return lambda step: round(step % steps / steps * most)
    start = draws.randint(20, 150) if "late" in kind else 0
    # The budget is full between a third of the rest and the end.
    rate = max(KiB, round(room / draws.uniform((STEPS - start) / 3, 0.9 * (STEPS - start))))
    return lambda step: max(0, step - start) * rate


def _judge(told: list[re.Match[str] | None], full: int) -> str:
    """Return what was told of a run that ended, whose budget was full at a step."""
    if len(told) != 1 or told[0] is None:
        return f"FAULT: told {len(told)} times"
    foretold = int(told[0][1].replace(",", ""))
    if abs(foretold - full) > FORETOLD_WITHIN * full:
        return f"FAULT: foretold step {foretold}, full at step {full}"
    return "told once, within a fifth of the step that was full, and at the end"


def late_runs(root: Path, seed: int, number: int) -> tuple[dict[str, Counter[str]], list[str]]:
    """Train runs of which a later step, or the validation, takes more memory than the first steps.

    Args:
        root: an empty folder.
        seed: draws steps and budgets.
        number: runs of each kind.

    Returns:
        Counts of repeated steps by kind, and what was wrong.
    """
    draws, counts, faults = random.Random(seed), dict[str, Counter[str]](), list[str]()
    for index in range(len(LATE) * number):
        kind = [*LATE][index % len(LATE)]
        since, steps = draws.randint(1, 20), 24
        (micro_batch, budget), heard = draws.choice(LATE[kind]), Heard()
        whole, expected = trained(late_workload(kind, since), root / "whole", Heard(), steps=steps)
        device = SimulatedDevice(load_profile("rtx-4090", user_dir=root), memory_budget=budget)
        out = root / str(index)
        asked = f"run {index}, {kind} after step {since}, micro-batch {micro_batch}, {budget:,} bytes"
        found, record = trained(
            late_workload(kind, since), out, heard, steps=steps, micro_batch=micro_batch, device=device
        )
        repeated = [row["step"] for row in rows(out) if row["recovered"]]
        outcome = f"{len(repeated)} of {steps} steps repeated"
        if any(one.startswith("out of memory in validation") for one in heard.notes):
            outcome += ", validation continued smaller"
        if float((found - whole).norm() / whole.norm()) > TOLERANCE:
            faults.append(f"{asked}: other weights")
        unlike = record.validation["loss"] or 0.0, expected.validation["loss"] or 1.0
        if abs(unlike[0] - unlike[1]) > TOLERANCE * unlike[1]:
            faults.append(f"{asked}: the loss of the validation is {unlike[0]}, not {unlike[1]}")
        if repeated != [int(one[1]) for one in map(REPEATED.match, heard.notes) if one is not None]:
            faults.append(f"{asked}: {outcome}, but told {heard.notes}")
        # Halved from 64 to 1 at the most, and once in memory that is fragmented.
        if len(repeated) > 1 + micro_batch.bit_length():
            faults.append(f"{asked}: {outcome}")
        counts.setdefault(kind, Counter())[outcome] += 1
        for folder in (out, root / "whole"):
            shutil.rmtree(folder)
    return counts, faults
