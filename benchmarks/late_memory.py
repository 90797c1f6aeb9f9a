"""Memory that changes while a run trains: a later step takes more of it.

All runs train on simulated GPUs, whose budgets are drawn at random, and which raise what a GPU would.
"""

from __future__ import annotations

import math
import random
import re
import shutil
from pathlib import Path

from autobatch.core.units import MiB
from autobatch.device.profiles import load_profile
from autobatch.device.simulated import SimulatedDevice
from benchmarks.report import Findings
from tests.support.late import late_workload, trained
from tests.support.probes import Listener
from tests.support.runs import rows

TOLERANCE = 1e-12
"""Relative error of weights in float64 after other micro-batches."""
LATE = {
    "longer samples": [(64, 2 * MiB)],
    "a layer": [(32, 2 * MiB), (64, 4 * MiB)],
    "validation": [(32, 2 * MiB), (64, 4 * MiB)],
}
"""Micro-batches and budgets that the first steps fit in, by what comes late."""
REPEATED = re.compile(r"^step (\d+): out of memory, repeated at micro-batch ")


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
