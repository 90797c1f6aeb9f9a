"""The stages of a run before training: probe, plan, tune; each goes on from what the one before returned."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from autobatch.attempt import Bench
from autobatch.bench import Facts, find_workload, open_bench
from autobatch.config import FitOptions, PlanOptions, ProbeOptions, TuneOptions
from autobatch.hardware import data_home
from autobatch.knobs import COMPILE, PRECISION, SPLIT, Axis, applicable, defaults, parse_knobs
from autobatch.planning import micro_batches
from autobatch.prior import pictures
from autobatch.probers import open_prober
from autobatch.probing import caps_of, plan_from, run_lengths, run_probe
from autobatch.progress import Progress, Silent
from autobatch.records import Plan
from autobatch.results import Result
from autobatch.tuning.lab import Task
from autobatch.tuning.labs import open_trials
from autobatch.tuning.tuner import Budget, Place, Tuned, tune
from autobatch.workload import Workload

TRIAL_SECONDS = 0.5
"""Time that a trial measures for, about."""
PLANNED_STEPS = 1000
"""Optimizer steps of the run that is tuned for, where nobody says how many it will be."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What surrounds a call: who is told, where things are kept, and whether attempts are isolated."""

    progress: Progress = field(default_factory=Silent)
    isolated: bool = False
    """Probe in a child process (only a workload that is named can be)."""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    command: str = ""
    """What repeats this call."""
    entered: Callable[[Path], None] = lambda _: None
    """Told the folder of a run as soon as it is known."""
    clock: Callable[[], float] = time.monotonic

    @property
    def home(self) -> Path:
        """Where autobatch keeps what it learned."""
        return data_home(self.environ)

    def isolates(self, workload: Workload | str | None) -> bool:
        """Whether what is tried of a workload runs in a child: one that is no reference cannot."""
        return self.isolated and not isinstance(workload, Workload)

    def has_passed(self, seconds: float | None, since: float) -> Callable[[], bool]:
        """Whether so many seconds have passed, asked later; never, for ``None``."""
        return lambda: seconds is not None and self.clock() - since > seconds


def run_probe_command(
    workload: Workload | str | None, options: ProbeOptions, environment: Environment
) -> Result:
    """``autobatch probe``."""
    with open_prober(workload, options, isolated=environment.isolated) as prober:
        found, profile = run_probe(prober, options, progress=environment.progress, home=environment.home)
        if options.micro_batch is None:
            found = run_lengths(prober, options, found, environment.progress)
        return Result(device=prober.facts.device, probe=found, profile=profile, command=environment.command)


def run_plan_command(
    workload: Workload | str | None, options: PlanOptions, environment: Environment
) -> Result:
    """``autobatch plan``."""
    return plan_only(workload, options, environment, is_whole=True)[0]


def plan_only(
    workload: Workload | str | None,
    options: PlanOptions,
    environment: Environment,
    *,
    is_whole: bool = False,
) -> tuple[Result, Facts]:
    """Probe and plan; also what the plan rests on.

    An interrupted probe answers with the best size so far where the plan is the whole of what was asked;
    where more was to follow, the interrupt ends that too.
    """
    with open_prober(workload, options, isolated=environment.isolated) as prober:
        facts = prober.facts
        # What the plan cannot be must be known before minutes are spent on a probe.
        plan_from(facts, 1, options)
        found, profile = run_probe(prober, options, progress=environment.progress, home=environment.home)
        step = prober.step
    if found.stopped_by == "interrupt" and not is_whole:
        raise KeyboardInterrupt
    planned = plan_from(facts, found.micro_batch, options)
    environment.progress.planned(planned)
    predicted, curve = pictures(step, facts, found.micro_batch)
    result = Result(
        device=facts.device,
        probe=found,
        plan=planned,
        profile=profile,
        title=facts.name,
        command=environment.command,
        predicted=predicted,
        memory_curve=curve,
    )
    return result, facts


def tuned(
    result: Result,
    facts: Facts,
    workload: Workload | str | None,
    options: TuneOptions,
    environment: Environment,
    *,
    bench: Bench | None = None,
) -> Result:
    """Tune what the plan leaves open, and put the choice into the plan.

    Args:
        result: with a probe and a plan.
        facts: what they rest on.
        workload: the workload, or a reference to it.
        options: of the command.
        environment: what surrounds the call.
        bench: where trials run in this process; opened here if there is none.

    Raises:
        InputError: the storage cannot be used, or the study was made for something else.
        AutobatchError: the workload cannot be run with every knob at its default.
    """
    plan, probe = result.plan, result.probe
    assert plan is not None
    assert probe is not None
    progress = environment.progress
    start = environment.clock()
    task = Task(
        limit=probe.micro_batch,
        cap=min(caps_of(facts, options).values()),
        samples=sum(plan.micro_batches),
        planned_steps=_planned_steps(options, facts),
        seconds=TRIAL_SECONDS,
    )
    named = None if isinstance(workload, Workload) else workload
    isolated = environment.isolates(workload)
    open_it = bench_opener(workload, options, bench)
    with open_trials(named, options, task, bench=open_it, isolated=isolated) as trials:
        asked = None if options.knobs is None else parse_knobs(options.knobs)
        axes, notes = applicable(trials.situation(), asked)
        trials.begin(defaults(axes))
        for line in notes:
            progress.note(line)
        found = tune(
            trials.measure,
            axes,
            budget=Budget(options.trials, environment.has_passed(options.timeout, start)),
            seed=options.seed,
            place=_place(facts, options, task, axes, environment),
            certify=trials.certify,
            progress=lambda number, values, one: progress.measured(
                number, options.trials, values, one.samples_per_s, one.failure
            ),
        )
    for line in found.tuning.notes:
        progress.note(line)
    progress.tuned(found.tuning)
    planned = with_choice(plan, found, axes)
    if planned != plan:
        progress.planned(planned)
    return msgspec.structs.replace(result, tuning=found.tuning, plan=planned)


def bench_opener(
    workload: Workload | str | None, options: TuneOptions, bench: Bench | None
) -> Callable[[], Bench]:
    """Opens what trials in this process run on: the bench that is there, else one of the workload."""
    return lambda: bench or open_bench(find_workload(workload), options, demo=workload is None)


def with_choice(planned: Plan, found: Tuned, axes: Sequence[Axis]) -> Plan:
    """The plan with what the tuner chose; the effective batch stays what it is."""
    if found.winner is None or found.tuning.best == defaults(axes):
        return planned
    sizes = micro_batches(sum(planned.micro_batches), found.winner.micro_batch)
    base = defaults(axes)
    # What is at its default is no choice that a plan need repeat; the split is the plan itself.
    knobs = {
        name: value for name, value in found.tuning.best.items() if value != base[name] and name != SPLIT
    }
    return msgspec.structs.replace(
        planned,
        micro_batch=sizes[0],
        accumulation_steps=len(sizes),
        micro_batches=sizes,
        precision=knobs.pop(PRECISION, None) or planned.precision,
        knobs=knobs,
    )


def _place(
    facts: Facts, options: TuneOptions, task: Task, axes: Sequence[Axis], environment: Environment
) -> Place:
    """The study: named by what its figures depend on, unless a name was given."""
    made_for = purpose_of(facts, options)
    if any(axis.name == COMPILE for axis in axes):
        made_for["planned_steps"] = task.planned_steps
    workers = getattr(options, "workers", None)
    if workers is not None:
        made_for["workers"] = workers
    content = msgspec.json.encode([made_for, axes], order="deterministic")
    name = options.study or f"{facts.name}-{hashlib.sha256(content).hexdigest()[:12]}"
    return Place(name, storage_of(options, name, environment), made_for)


def purpose_of(facts: Facts, options: TuneOptions) -> dict[str, Any]:
    """What the figures of any study depend on, by name."""
    key: dict[str, Any] = {name: value for name, value in facts.key.items() if name not in _NOT_A_PURPOSE}
    return key | {
        "target_batch": options.target_batch,
        "memory_budget": None if options.memory_budget is None else str(options.memory_budget),
        "max_micro_batch": options.max_micro_batch,
    }


def storage_of(options: TuneOptions, name: str, environment: Environment) -> str | None:
    """Where a study is kept: where that was asked for, else in a file of its own, else in memory."""
    if options.storage is not None:
        return options.storage
    folder = environment.home / "studies"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return str(folder / f"{name}.log")
        reason = "it cannot be written"
    except OSError as error:
        reason = error.strerror or str(error)
    environment.progress.note(
        f"the study {name} is kept in memory, and cannot go on later: {folder}: {reason}; give --storage, or "
        "set AUTOBATCH_HOME to a directory that can be written"
    )
    return None


def check_storage(options: TuneOptions) -> None:
    """See that the storage that was asked for can be used, before minutes are spent on a probe.

    Raises:
        InputError: it cannot.
    """
    if options.storage is not None and (options.trials or options.tune_lr):
        from autobatch.tuning.keeping import check_storage

        check_storage(options.storage)


_NOT_A_PURPOSE = ("budget_bytes", "total_bytes")
"""What is free differs from one minute to the next, and says nothing about which configuration is fast."""


def _planned_steps(options: TuneOptions, facts: Facts) -> int:
    if not isinstance(options, FitOptions):
        return PLANNED_STEPS
    if options.steps is not None:
        return options.steps
    return max(1, math.ceil((options.epochs or 1) * facts.samples / options.target_batch))
