"""Whether a limit holds on samples of different sizes: plan, then train and count out-of-memory errors.

    python -m benchmarks.ragged.promise [--steps 500] [--seeds 0 1 2] [--device sim:t4] [--device cpu]

For a split by count, brute force then trains at larger micro-batches, those of plans with fewer accumulation
steps, until one survives all steps.
"""

from __future__ import annotations

import argparse
import itertools
import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import msgspec

from autobatch.api.pipeline import RunContext, run_plan
from autobatch.core.check_options import options_from
from autobatch.core.errors import AutobatchError
from autobatch.core.options import RankPlanOptions
from autobatch.core.records import Plan
from autobatch.planning import micro_batches
from autobatch.probing.attempt import TrainSetup, attempt
from autobatch.probing.setup import SetupSettings, open_setup
from autobatch.training.build import LoopSettings, build_sampler, open_loop
from benchmarks.ragged.workloads import PAIRS, workload
from benchmarks.report import save, surroundings

TARGET = 64
SHARES = (0.2, 0.4, 0.7)
"""Budgets, as shares of the memory of a batch in one micro-batch."""


def setup_of(model: str, lengths: str, device: str, budget: int | str, seed: int) -> TrainSetup:
    """Open a workload on a device that enforces its budget in training too."""
    setup = open_setup(
        workload(model, lengths), SetupSettings(device=device, memory_budget=budget, seed=seed)
    )
    if device == "cpu":
        setup.device.training = MethodType(_enforced, setup.device)  # type: ignore[method-assign]
    return setup


@contextmanager
def _enforced(self: Any) -> Iterator[Any]:
    with self.enforced() as meter:
        yield meter


def train(setup: TrainSetup, plan: Plan, steps: int, seed: int, *, to_first: bool) -> tuple[int, int]:
    """Train a plan; return the out-of-memory errors, and the step of the first one or the last step.

    Args:
        setup: the workload.
        plan: the plan.
        steps: optimizer steps.
        seed: of the order of the data.
        to_first: stop at the first error.
    """
    settings = LoopSettings(target_batch=plan.target_batch, seed=seed, steps=steps)
    sampler = build_sampler(len(setup.workload.train_data), settings)
    first = 0
    with open_loop(setup, plan, settings, sampler, seeded_before=None, note=lambda _: None) as loop:
        for record in loop.run():
            if loop.oom_recoveries:
                first = first or record.step
                if to_first:
                    break
        return loop.oom_recoveries, first or loop.batches_seen


def by_brute_force(
    case: tuple[str, str], device: str, budget: int, seed: int, steps: int, above: int, limit: int
) -> int:
    """Return the largest micro-batch over ``above``, and up to ``limit``, that trains without an error."""
    counts = range(math.ceil(TARGET / limit), math.ceil(TARGET / above))
    for count in counts:
        setup = setup_of(*case, device, budget, seed)
        sizes = micro_batches(TARGET, math.ceil(TARGET / count))
        plan = msgspec.structs.replace(
            PLAN, micro_batch=sizes[0], micro_batches=sizes, accumulation_steps=len(sizes)
        )
        try:
            errors, _ = train(setup, plan, steps, seed, to_first=True)
        except AutobatchError:
            continue
        if not errors:
            return sizes[0]
    return above


PLAN = Plan(
    target_batch=TARGET,
    effective_batch=TARGET,
    world_size=1,
    micro_batch=1,
    accumulation_steps=TARGET,
    micro_batches=[1] * TARGET,
    base_batch=None,
    learning_rate=1e-3,
    learning_rate_rule="none",
)


def budget_of(case: tuple[str, str], device: str, share: float) -> int:
    """Return a budget, as a share of what a batch in one micro-batch of its most expensive samples takes."""
    setup = setup_of(*case, device, "4GiB", 0)
    one, whole = (attempt(setup, size).attempt for size in (2, TARGET))
    low, high = (each.peak_reserved_bytes or each.peak_allocated_bytes or 0 for each in (one, whole))
    return int(low + share * (high - low)) // 2**20 * 2**20 + 2**20


def measure(
    case: tuple[str, str], device: str, budget: int, seed: int, steps: int, *, brute: bool
) -> list[dict[str, Any]]:
    """Plan a case under both splits and train it; compare the split by count with brute force."""
    rows = []
    for split in ("count", "auto"):
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as home:
            options = options_from(
                RankPlanOptions,
                {
                    "target_batch": TARGET,
                    "device": device,
                    "memory_budget": budget,
                    "seed": seed,
                    "split": split,
                },
            )
            context = RunContext(environ={"AUTOBATCH_HOME": str(Path(home))})
            result = run_plan(workload(*case), options, context)
        assert result.plan is not None
        assert result.probe is not None
        planned = time.perf_counter() - start
        errors, at = train(setup_of(*case, device, budget, seed), result.plan, steps, seed, to_first=False)
        real = result.probe.real_batches
        alone = result.probe.micro_batch if real is None else real.micro_batch_alone
        row = {
            "model": case[0], "lengths": case[1], "device": device, "budget_bytes": budget, "seed": seed,
            "steps": steps, "asked": split, "split": result.plan.split, "alone": alone,
            "micro_batch": result.plan.micro_batch, "checked_by": None if real is None else real.by,
            "oom_errors": errors, "first_oom_step": at if errors else None, "plan_seconds": planned,
        }  # fmt: skip
        if brute and split == "count":
            most = by_brute_force(case, device, budget, seed, steps, result.plan.micro_batch, alone)
            row["brute_force"] = most
            row["share"] = result.plan.micro_batch / most
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    """Measure every case, and save the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--device", action="append")
    parser.add_argument("--case", action="append", help="MODEL-LENGTHS")
    parser.add_argument("--no-brute-force", action="store_true")
    options = parser.parse_args()
    cases = [case for case in PAIRS if not options.case or "-".join(case) in options.case]
    rows: list[dict[str, Any]] = []
    devices = options.device or ["sim:t4", "cpu"]
    for seed, share, case, device in itertools.product(options.seeds, SHARES, cases, devices):
        brute = not options.no_brute_force and device != "cpu"
        budget = budget_of(case, device, share)
        rows += measure(case, device, budget, seed, options.steps, brute=brute)
        save("ragged-promise", {**surroundings(), "rows": rows}, text(rows) + "\n")


def text(rows: list[dict[str, Any]]) -> str:
    """Summarize the rows in a table."""
    lines = [
        "| device | split | runs | out-of-memory errors | runs with an error | micro-batch ÷ brute force |"
    ]
    lines += ["|---|---|---|---|---|---|"]
    for device in dict.fromkeys(row["device"] for row in rows):
        for asked in ("count", "auto"):
            own = [row for row in rows if row["device"] == device and row["asked"] == asked]
            shares = [row["share"] for row in own if "share" in row]
            least = f"{min(shares):.2f} at least" if shares else "–"
            errors = [row["oom_errors"] for row in own]
            lines.append(
                f"| {device} | {asked} | {len(own)} | {sum(errors)} | {sum(map(bool, errors))} | {least} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
