"""The largest size of a program that has no `Workload`, and its plan of equal micro-batches.

saved limit ──guess──► search by runs ──► limit ──► equal micro-batches
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import msgspec

from autobatch.core.errors import DoesNotFitError, InputError
from autobatch.core.options import Options
from autobatch.core.records import DeviceRecord, LimitedBy, Plan
from autobatch.core.units import format_bytes
from autobatch.device.cuda_allocator import allocator_options
from autobatch.device.select import open_device
from autobatch.estimates.copies import run_in_copies
from autobatch.footprint.fitting import Fitting
from autobatch.integrations.script import Runner
from autobatch.planning import equal_plan, even_split_note
from autobatch.rehearsal.setup import KeyValue
from autobatch.report.result import Result
from autobatch.search.probe import Limit, find_largest
from autobatch.search.saved import keep, recall

MOST = 1 << 20
"""The largest size that is tried without a cap."""


def describe_gpu(memory_budget: str | int | None) -> DeviceRecord:
    """Return the first GPU and its budget. A copy of this process reads it, which keeps no context there.

    Raises:
        InputError: there is no GPU, or the budget exceeds its memory.
    """
    return run_in_copies(
        [lambda: open_device("cuda", memory_budget=memory_budget, environ=os.environ).describe()]
    )[0]


def find_limit(runner: Runner, options: Options, *, home: Path) -> Result:
    """Find the largest micro-batch at which a command runs, and plan its target batch if there is one.

    Args:
        runner: runs the command.
        options: the caps, the multiple and the target batch.
        home: data directory, in which answers are saved.

    Raises:
        DoesNotFitError: not even the smallest micro-batch fits.
        InputError: the command takes no optimizer step, or its ranks cannot share the target batch equally.
    """
    device, progress, outcomes = runner.device, runner.progress, runner.outcomes
    multiple, target = options.search.micro_batch_multiple, options.batch.target_batch
    most: dict[LimitedBy, int | None] = {
        "max_micro_batch": options.search.max_micro_batch,
        "target_batch": target,
        "memory": MOST,
    }
    caps = {name: size for name, size in most.items() if size is not None}
    cap = min(caps.values())
    if cap < multiple:
        raise InputError(f"micro-batches of at most {cap} are no multiples of {multiple}: ask for more")
    key: dict[str, KeyValue] = {
        "workload": f"-- {runner.command}",
        "files": runner.command.files(),
        "device": device.name,
        "device_kind": device.kind,
        "total_bytes": device.total_bytes,
        "budget_bytes": device.budget_bytes,
        "allocator": allocator_options(os.environ) or None,
    }
    found = find_largest(
        runner.run,
        caps,
        runner.new_allocator,
        falling=partial(runner.new_allocator, falls=True),
        multiple=multiple,
        known=recall(key, home),
    )
    limit = found.probe.micro_batch
    above = outcomes.get(limit + multiple)
    if not limit and found.probe.stopped_by is not None:
        raise KeyboardInterrupt
    if not limit:
        smallest = outcomes[min(outcomes)].attempt
        raise DoesNotFitError(
            f"a micro-batch of {smallest.micro_batch} does not fit in the budget of "
            f"{format_bytes(device.budget_bytes)}: {smallest.reason}. What helps: a larger --memory-budget, "
            "or flags of the command with which it takes less, such as 16 bits or recomputed activations. "
            "autobatch record and estimate --snapshot show the lines that take it"
        )
    if above is not None and above.error is not None:
        progress.note(f"a micro-batch of {limit + multiple:,} does not run: {above.attempt.reason}")
    plan = None if target is None else _equal_plan(runner, target, found, multiple)
    attempts = [outcome.attempt for outcome in outcomes.values()]  # with those of the plan
    oom_count = sum(not (attempt.fits or attempt.is_error) for attempt in attempts)
    probe = msgspec.structs.replace(found.probe, attempts=attempts, oom_count=oom_count)
    file = keep(probe, found.programs, key, home=home, progress=progress)
    return Result(device=device, probe=probe, plan=plan, profile=file)


def _equal_plan(runner: Runner, target: int, found: Limit, multiple: int) -> Plan:
    """Plan equal micro-batches; one smaller than the limit runs if the replay doubts it.

    It may fail, because the allocator cuts its memory in another way.
    """
    limit = found.probe.micro_batch
    plan = equal_plan(target, limit, world_size=runner.world, multiple=multiple)
    new_allocator = partial(runner.new_allocator, falls=found.falls)
    fitting = Fitting(found.programs, new_allocator) if found.programs else None
    while plan.micro_batch not in runner.outcomes and fitting and not fitting.fits(plan.micro_batch):
        if runner.run(plan.micro_batch).attempt.fits:
            break
        plan = equal_plan(target, plan.micro_batch - 1, world_size=runner.world, multiple=multiple)
    note = even_split_note(plan, limit)
    if note is not None:
        runner.progress.note(note)
    return plan
