"""The stages of a run before training: probe, plan, tune; each goes on from what the one before returned."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from autobatch.attempt import Bench
from autobatch.bench import Facts, can_fuse, facts_of, find_workload, open_bench
from autobatch.config import PlanOptions, ProbeOptions, TuneOptions
from autobatch.hardware import data_home
from autobatch.knobs import Situation, Value, applicable
from autobatch.planning import micro_batches
from autobatch.probers import open_prober
from autobatch.probing import plan_from, run_lengths, run_probe
from autobatch.progress import Progress, Silent
from autobatch.records import Plan, Tuning
from autobatch.results import Result
from autobatch.trial import measure, micro_batch_of, outgrows
from autobatch.tuner import Budget, Measurement
from autobatch.tuner import tune as search_knobs
from autobatch.workload import Workload

TRIAL_SECONDS = 0.3
"""Time that a trial measures for, about."""


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
    if found.stopped_by == "interrupt" and not is_whole:
        raise KeyboardInterrupt
    planned = plan_from(facts, found.micro_batch, options)
    environment.progress.planned(planned)
    result = Result(
        device=facts.device, probe=found, plan=planned, profile=profile, command=environment.command
    )
    return result, facts


def run_tune_command(
    workload: Workload | str | None, options: TuneOptions, environment: Environment
) -> Result:
    """``autobatch tune``."""
    result, _ = plan_only(workload, options, environment)
    bench = open_bench(find_workload(workload), options, demo=workload is None)
    storage = options.storage or str(environment.home / "studies" / f"{study_name(bench, options)}.log")
    return tuned(result, bench, options, environment, storage=storage)


def tuned(
    result: Result, bench: Bench, options: TuneOptions, environment: Environment, *, storage: str
) -> Result:
    """Tune what the plan leaves open, and put the choice into the plan."""
    assert result.plan is not None
    assert result.probe is not None
    limit, samples = result.probe.micro_batch, sum(result.plan.micro_batches)
    knobs = applicable(_situation(bench, options, limit, samples))
    start = environment.clock()
    refused: dict[tuple[tuple[str, Value], ...], str | None] = {}

    def run(values: Mapping[str, Value]) -> Measurement:
        key = tuple(sorted(values.items()))
        if key not in refused:
            refused[key] = outgrows(bench, limit=limit, samples=samples, values=values)
        reason = refused[key]
        if reason is None:
            cost = measure(bench, limit=limit, samples=samples, values=values, seconds=TRIAL_SECONDS)
            reason = cost.failure
        return Measurement(0.0, reason) if reason else Measurement(samples / cost.step_seconds)

    def expired() -> bool:
        return options.timeout is not None and environment.clock() - start > options.timeout

    found = search_knobs(
        run,
        knobs,
        budget=Budget(options.trials, expired),
        seed=options.seed,
        study_name=options.study or study_name(bench, options),
        storage=storage,
        progress=lambda number, values, one: environment.progress.measured(
            number, options.trials, values, one.samples_per_s, one.failure
        ),
    )
    environment.progress.tuned(found)
    planned = with_knobs(result.plan, found, limit)
    if planned != result.plan:
        environment.progress.planned(planned)
    return msgspec.structs.replace(result, tuning=found, plan=planned)


def with_knobs(planned: Plan, tuning: Tuning, limit: int) -> Plan:
    """The plan with what the tuner chose; the effective batch stays what it is."""
    samples = sum(planned.micro_batches)
    sizes = micro_batches(samples, micro_batch_of(limit, samples, tuning.best))
    # A knob at its default (off) is no choice that a plan need repeat.
    knobs = {name: value for name, value in tuning.best.items() if value and name != "micro_batch_shift"}
    return msgspec.structs.replace(
        planned,
        micro_batch=sizes[0],
        accumulation_steps=len(sizes),
        micro_batches=sizes,
        precision=knobs.pop("precision", None) or planned.precision,
        knobs=knobs,
    )


def study_name(bench: Bench, options: TuneOptions) -> str:
    """Names a study by what its figures depend on."""
    key = facts_of(bench).key
    return (
        f"{key['workload']}-{key['model']}-{key['device_kind']}-{key['budget_bytes']}-{options.target_batch}"
    )


def _situation(bench: Bench, options: TuneOptions, limit: int, samples: int) -> Situation:
    return Situation(
        device_kind=bench.device.kind,
        precision_is_open=options.precision == "auto",
        bf16_is_native=bench.precision == "bf16",
        fused_optimizer=can_fuse(bench.workload),
        micro_batch_limit=limit,
        samples=samples,
    )
