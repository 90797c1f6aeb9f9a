"""Whether a limit holds on samples of different sizes: plan a run, then train it and count what fails.

    python -m benchmarks.ragged.promise FOLDER [--replay] [--minutes 9] [--seeds 3]

Plans every workload as ``autobatch fit`` does, under three budgets on a simulated GPU and on the CPU, which
also enforces its budget in training here. For a split by count, brute force then looks for a plan with fewer
accumulation steps that survives all steps of the run. ``--replay`` replays the steps in the model of the
allocator, which takes a fiftieth of the time, and agrees with training in every case that ran both ways. Each
row is kept in FOLDER as it is measured, so that a call continues an earlier one.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import msgspec

from autobatch import AutobatchError, Plan
from autobatch.api.call import Call
from autobatch.api.pipeline import prepare
from autobatch.core.check_options import options_from
from autobatch.core.options import Options
from autobatch.footprint.sizes import SizeProgram
from autobatch.planning import make_plan
from autobatch.rehearsal.attempt import attempt
from autobatch.rehearsal.setup import Setup, open_setup
from autobatch.search.curve import trace_setup
from autobatch.search.hazards import is_padded
from autobatch.search.real_batches import RunBatches, first_batches
from autobatch.training.build import build_sampler, open_loop
from autobatch.training.noise_scale import NoiseScale
from autobatch.workload.split import SizeSplit, Split
from benchmarks.gpu.journal import DONE, Journal, last_call
from benchmarks.ragged.workloads import MODELS, PAIRS, workload
from benchmarks.report import arguments, markdown, save, surroundings

TARGET = 64
SHARES = (0.2, 0.4, 0.7)
"""Budgets, as shares of the memory of a batch in one micro-batch."""
DEVICES = ["sim:t4", "cpu"]


class Case(NamedTuple):
    """A workload on a device with a budget."""

    model: str
    lengths: str
    device: str
    share: float

    @property
    def name(self) -> str:
        """Name in the journal."""
        return f"{self.model} {self.lengths} {self.device} {self.share:g}"

    def setup(self, budget: int | str, seed: int) -> Setup:
        """Open it on a device that enforces its budget in training too."""
        made = workload(self.model, self.lengths)
        setup = open_setup(made, Options().with_values(device=self.device, memory_budget=budget, seed=seed))
        if self.device == "cpu":
            setup.device.training = MethodType(_enforced, setup.device)  # type: ignore[method-assign]
        return setup


@functools.cache
def budget_of(case: Case) -> int:
    """Return the budget: a share of what a batch in one micro-batch of its costliest samples takes."""
    setup = case.setup("4GiB", 0)
    one, whole = (attempt(setup, size).attempt for size in (2, TARGET))
    low, high = (each.peak_reserved_bytes or each.peak_allocated_bytes or 0 for each in (one, whole))
    return int(low + case.share * (high - low)) // 2**20 * 2**20 + 2**20


@contextmanager
def _enforced(self: Any) -> Iterator[Any]:
    with self.enforced() as meter:
        yield meter


def train(setup: Setup, plan: Plan, steps: int, seed: int, *, to_first: bool) -> int:
    """Train a plan, and return the out-of-memory errors.

    Args:
        setup: the workload.
        plan: the plan.
        steps: optimizer steps.
        seed: of the order of the data.
        to_first: stop at the first error.
    """
    settings = options_from("fit", {"target_batch": plan.target_batch, "seed": seed, "steps": steps})
    sampler = build_sampler(len(setup.workload.train_data), settings)
    with open_loop(setup, plan, settings, sampler) as loop:
        for _ in loop.run():
            if loop.oom_recoveries and to_first:
                break
        return loop.oom_recoveries


class Run(NamedTuple):
    """A number of steps of a case under a budget, trained or replayed."""

    case: Case
    budget: int
    seed: int
    steps: int
    is_trained: bool

    def oom_errors(self, plan: Plan, *, to_first: bool = False) -> int:
        """Return the out-of-memory errors: all of them in training, at most one in a replay."""
        setup = self.case.setup(self.budget, self.seed)
        sizes = setup.worst_case.sizes()
        assert sizes is not None
        program = None if self.is_trained else program_of(self.case.model, self.case.lengths)
        if program is None:
            return train(setup, plan, self.steps, self.seed, to_first=to_first)
        batches = RunBatches(
            setup=setup,
            sizes=sizes,
            sampler=first_batches(setup, TARGET, self.seed),
            program=program,
            joins=not is_padded(setup.workload, sizes),
        )
        split: Split = Split()
        micro_batch = plan.micro_batch
        if plan.size_cut is not None:
            split = SizeSplit(sizes=sizes, cut=plan.size_cut, measured_every=NoiseScale.every)
            micro_batch = max(plan.size_cut.micro_batches)
        found = batches.replay(split, micro_batch, batches.first(self.steps), most_events=10**12)
        assert found in (None, self.steps)
        return int(found is None)

    def survives(self, plan: Plan) -> bool:
        """Return whether all steps of a plan fit."""
        try:
            return not self.oom_errors(plan, to_first=True)
        except AutobatchError:
            return False


@functools.cache
def program_of(model: str, lengths: str) -> SizeProgram | None:
    """Trace a workload over sizes; None if that is not possible."""
    setup = Case(model, lengths, "cpu", 0.0).setup("4GiB", 0)
    return trace_setup(setup)


def by_brute_force(run: Run, plan: Plan) -> int:
    """Return the largest micro-batch that survives all steps; at least that of the plan, which has run.

    A replay that fails ends soon, so that all larger ones are tried, the largest first. Training begins with
    the next larger one, and goes on until one fails.
    """
    larger = [
        make_plan(target_batch=TARGET, micro_batch_limit=math.ceil(TARGET / count), learning_rate=1e-3)
        for count in range(1, plan.accumulation_steps)
    ]
    if run.is_trained:
        found = [one.micro_batch for one in itertools.takewhile(run.survives, reversed(larger))]
        return max(found, default=plan.micro_batch)
    return next((one.micro_batch for one in larger if run.survives(one)), plan.micro_batch)


def measure(run: Run, split: str, folder: Path) -> dict[str, Any]:
    """Plan a run as ``autobatch fit`` does, train or replay it, and compare it with brute force."""
    case = run.case
    asked = {
        "target_batch": TARGET, "device": case.device, "memory_budget": run.budget, "seed": run.seed,
        "split": split, "steps": run.steps, "trials": 0, "out": str(folder / "out"),
    }  # fmt: skip
    options = options_from("fit", asked)
    model = workload(case.model, case.lengths)
    os.environ["AUTOBATCH_HOME"] = str(folder / "home")
    call = Call(workload=model, options=options)
    start = time.process_time()
    with ExitStack() as held:
        result = prepare(call, held).result
    planned = time.process_time() - start
    plan, probe = result.plan, result.probe
    assert plan is not None
    assert probe is not None
    row = {
        **case._asdict(), "budget_bytes": run.budget, "seed": run.seed, "steps": run.steps,
        "is_trained": run.is_trained, "asked": split, "split": plan.split, "micro_batch": plan.micro_batch,
        "limit": probe.micro_batch, "real_batches": msgspec.to_builtins(probe.real_batches),
        "steps_of_cut": None if plan.size_cut is None else plan.size_cut.steps,
        "oom_errors": run.oom_errors(plan), "plan_seconds": round(planned, 3),
    }  # fmt: skip
    if split == "count":
        row["brute_force"] = by_brute_force(run, plan)
    print(row, flush=True)
    return row


def text(rows: list[dict[str, Any]]) -> str:
    """Summarize the rows in a table."""
    head = ("device", "steps", "model", "split asked for", "runs", "split by size", "out-of-memory errors")
    lines = []

    def group(row: dict[str, Any]) -> tuple[str, ...]:
        return row["device"], "trained" if row["is_trained"] else "replayed", row["model"], row["asked"]

    for name in sorted(set(map(group, rows))):
        own = [row for row in rows if group(row) == name]
        shares = [row["micro_batch"] / row["brute_force"] for row in own if "brute_force" in row]
        cut, errors = sum(row["split"] == "size" for row in own), sum(row["oom_errors"] for row in own)
        lines.append([*name, len(own), cut, errors, f"{min(shares):.2f}" if shares else ""])
    return markdown([*head, "micro-batch ÷ brute force, at least"], lines)


def main() -> None:
    """Measure every row that is not in the journal, and save the results."""
    options = arguments(
        __doc__, folder=Path, minutes=math.inf, steps=500, seeds=3, replay=False, device=DEVICES,
        model=[*MODELS],
    )  # fmt: skip
    options.folder.mkdir(parents=True, exist_ok=True)
    journal = Journal(options.folder, last_call(options.folder) + 1)
    deadline = time.monotonic() + 60 * options.minutes
    done = journal.done()
    # Every workload has its first seed before any has its second one.
    for seed, share, pair, device, split in itertools.product(
        range(options.seeds), SHARES, PAIRS, options.device, ("count", "auto")
    ):
        case = Case(*pair, device, share)
        unit = f"{case.name} {seed} {split}"
        if unit in done or case.model not in options.model:
            continue
        if time.monotonic() > deadline:
            break
        run = Run(case, budget_of(case), seed, options.steps, not options.replay)
        journal.write(unit, DONE, row=measure(run, split, options.folder))
    rows = [unit["row"] for unit in journal.rows()]
    print(text(rows))
    save("ragged-promise", {**surroundings(), "rows": rows}, text(rows))


if __name__ == "__main__":
    main()
