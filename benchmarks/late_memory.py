"""Memory that changes while a run trains: it grows from step to step, or a later step takes more of it.

All runs train on simulated GPUs, whose budgets are drawn at random, and which raise what a GPU would.
"""

from __future__ import annotations

import math
import random
import re
import shutil
from pathlib import Path
from typing import Any

from autobatch import DoesNotFitError, RestartSmallerError
from autobatch.core.units import KiB, MiB
from autobatch.device.profiles import load_profile
from autobatch.device.simulated import SimulatedDevice
from benchmarks.report import Findings
from tests.support.late import Held, late_workload, trained
from tests.support.probes import Listener
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


def growing_runs(root: Path, seed: int, number: int) -> Findings:
    """Train runs whose code keeps tensors, and runs whose code keeps as many for a while only.

    Args:
        root: an empty folder.
        seed: draws rates, steps and budgets.
        number: runs of each kind.

    Returns:
        What was told, by kind.
    """
    draws, findings = random.Random(seed), Findings()
    for index in range(len(KEPT) * number):
        kind = KEPT[index % len(KEPT)]
        budget, heard = draws.randint(12, 48) * MiB, Listener()
        held = _course(kind, draws, budget)
        device = SimulatedDevice(load_profile("rtx-4090", user_dir=root), memory_budget=budget)
        out = root / str(index)
        try:
            trained(late_workload("", NEVER, held), out, heard, steps=STEPS, device=device)
            said, has_ended = " ".join(heard.notes), False
        except (DoesNotFitError, RestartSmallerError) as error:
            said, has_ended = "; ".join([str(error), *error.__notes__]), True
        told = [FOUND.match(one) for one in heard.notes if one.startswith("memory grows")]
        fault = ""
        if not kind.startswith("kept"):
            outcome, fault = "nothing told, no end", f"told {said}" if said else ""
        elif "memory grew by" not in said:
            outcome, fault = "no cause", f"no cause in {said[-200:]!r}"
        elif not has_ended:
            outcome = "finished in smaller micro-batches, with the cause told"
        else:
            outcome = "told once, within a fifth of the step that was full, and at the end"
            fault = _unlike(told, rows(out))
        findings.add(kind, outcome, f"run {index}, {budget:,} bytes: {fault}" if fault else "")
        shutil.rmtree(out)
    return findings


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


def _unlike(told: list[re.Match[str] | None], metrics: list[dict[str, Any]]) -> str:
    """Return what is wrong with the forecasts of a run that ended; nothing if all is right."""
    # The budget is full where memory first ran out.
    full = next((row["step"] for row in metrics if row["recovered"]), metrics[-1]["step"] + 1)
    if len(told) != 1 or told[0] is None:
        return f"told {len(told)} times"
    foretold = int(told[0][1].replace(",", ""))
    is_near = abs(foretold - full) <= FORETOLD_WITHIN * full
    return "" if is_near else f"foretold step {foretold}, full at step {full}"


def late_runs(root: Path, seed: int, number: int) -> Findings:
    """Train runs of which a later step, or the validation, takes more memory than the first steps.

    Args:
        root: an empty folder.
        seed: draws steps and budgets.
        number: runs of each kind.

    Returns:
        The repeated steps, by kind.
    """
    draws, findings, steps = random.Random(seed), Findings(), 24
    for index in range(len(LATE) * number):
        kind = [*LATE][index % len(LATE)]
        since = draws.randint(1, 20)
        (micro_batch, budget), heard = draws.choice(LATE[kind]), Listener()
        whole, expected = trained(late_workload(kind, since), root / "whole", Listener(), steps=steps)
        device = SimulatedDevice(load_profile("rtx-4090", user_dir=root), memory_budget=budget)
        out = root / str(index)
        found, record = trained(
            late_workload(kind, since), out, heard, steps=steps, micro_batch=micro_batch, device=device
        )
        repeated = [row["step"] for row in rows(out) if row["recovered"]]
        outcome = f"{len(repeated)} of {steps} steps repeated"
        if any(one.startswith("out of memory in validation") for one in heard.notes):
            outcome += ", validation continued smaller"
        loss, expected_loss = (one.validation["loss"] or math.nan for one in (record, expected))
        told = [int(one[1]) for one in map(REPEATED.match, heard.notes) if one is not None]
        faults = {
            "other weights": float((found - whole).norm() / whole.norm()) > TOLERANCE,
            f"the loss of the validation is {loss}, not {expected_loss}": not math.isclose(
                loss, expected_loss, rel_tol=TOLERANCE
            ),
            f"{outcome}, but told {heard.notes}": repeated != told,
            # Halved from 64 to 1 at the most, and once in memory that is fragmented.
            f"{outcome}, too many": len(repeated) > 1 + micro_batch.bit_length(),
        }
        fault = "; ".join(text for text, is_so in faults.items() if is_so)
        asked = f"run {index} after step {since}, micro-batch {micro_batch}, {budget:,} bytes"
        findings.add(kind, outcome, f"{asked}: {fault}" if fault else "")
        for folder in (out, root / "whole"):
            shutil.rmtree(folder)
    return findings
