"""Checks before a resume, that the checkpoint holds a run, and that this run is the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from autobatch.core.errors import CheckpointError, DoesNotFitError, InputError
from autobatch.core.options import Options
from autobatch.core.records import Plan
from autobatch.core.units import format_bytes
from autobatch.device.oom import first_line, is_oom
from autobatch.distributed.ranks import Ranks
from autobatch.training.checkpoint import (
    MANIFEST,
    Loaded,
    available_host_memory,
    clean_leftovers,
    list_checkpoints,
    load_newest,
)
from autobatch.training.run_folder import CHECKPOINTS
from autobatch.training.state_file import STATE
from autobatch.workload.data_digest import DataDigest
from autobatch.workload.order import ORDER_VERSION, GlobalBatchSampler, LastBatch, order_digest
from autobatch.workload.rng import random_state_of

_Count = Annotated[int, Meta(ge=0)]
_Positive = Annotated[int, Meta(ge=1)]
_BIT_EXACT_KEYS = {
    "device": "device",
    "device_kind": "kind of device",
    "total_bytes": "size of its memory",
    "torch": "torch",
    "precision": "--precision",
    "gradient_dtype": "--gradient-dtype",
}
"""Entries of the setup's key that a bit-exact resume depends on, with their names in messages."""


class _Facts(msgspec.Struct):
    """The facts of a checkpoint; see `autobatch.training.run.train_plan`."""

    plan: Plan
    seed: int
    warmup_samples: _Positive | None
    total_steps: _Positive
    samples: _Positive
    last_batch: LastBatch
    total_samples: _Positive
    ranks: list[dict[str, Any]]
    key: dict[str, Any] = {}
    order: int = 1
    """Version of the order; the first one was kept without a number."""
    sampler: str | None = None
    sample_seeds: bool = False
    notes: list[str] = []
    failed_checkpoints: list[int] = []
    times: dict[str, dict[str, float]] = {}
    data: DataDigest | None = None
    records: dict[str, Any] = {}


class _Counters(msgspec.Struct):
    """See `autobatch.training.loop_state`."""

    batches_seen: _Count
    steps_applied: _Count
    oom_recoveries: _Count
    skipped_steps_in_a_row: _Count


class _State(msgspec.Struct):
    """The part of a state whose form does not depend on the workload; see `loop_state.capture_loop`."""

    counters: _Counters
    model: dict[str, Any]
    buffers: dict[str, Any]
    optimizers: list[dict[Any, Any]]
    schedules: list[dict[Any, Any]]
    scaler: dict[str, Any] | None
    average: dict[str, Any] | None
    items_per_sample: Annotated[float, Meta(gt=0)] | None
    noise: dict[str, Any]
    random: list[dict[str, Any]]
    limits: list[_Positive]


def load_run_state(out: Path, ranks: Ranks | None = None) -> Loaded:
    """Load the newest valid checkpoint of a run, the same on all ranks.

    Raises:
        InputError: the run has no checkpoint, or every one is damaged.
        DoesNotFitError: the host memory does not suffice to load it.
    """
    folder = out / CHECKPOINTS
    try:
        (ranks or Ranks()).once(lambda: clean_leftovers(folder))
        loaded = load_newest(folder, check_content, ranks)
    except Exception as error:
        if not is_oom(error):
            raise
        raise DoesNotFitError(_not_enough_memory(folder, error)) from error
    if loaded is None:
        raise InputError(f"--resume found no checkpoint in {folder}: start without --resume")
    return loaded


def check_content(path: Path, state: Any, facts: Mapping[str, Any]) -> None:
    """Check that a checkpoint with valid sums holds a state that a run can continue from.

    Args:
        path: its folder, whose name has the number of its batches.
        state: what `autobatch.training.loop_state.capture_loop` returned.
        facts: what `autobatch.training.run.train_plan` stored beside it.

    Raises:
        CheckpointError: an entry is missing, has another type, or is out of its range; names it.
    """
    name = MANIFEST
    try:
        msgspec.convert(facts, _Facts)
        name = STATE
        found = msgspec.convert(state, _State)
        for one in found.random:
            random_state_of(one)
    except (ValueError, TypeError, LookupError) as error:  # with msgspec.ValidationError
        raise CheckpointError(f"{path}: {name} holds no run to resume: {error}") from None
    step, seen = int(path.name.removeprefix("step-")), found.counters.batches_seen
    if seen != step:
        raise CheckpointError(f"{path}: {name} has the state of step {seen}, not {step}")


def load_plan(resumed: Loaded, options: Options) -> Plan:
    """Return the plan that the run was started with.

    Raises:
        InputError: the target batch, the seed or the warm-up differs.
    """
    facts = resumed.facts
    plan = msgspec.convert(facts["plan"], Plan)
    for option, asked, found in (
        ("--target-batch", options.target_batch, plan.target_batch),
        ("--seed", options.device.seed, facts["seed"]),
        ("--warmup-samples", options.train.warmup_samples, facts["warmup_samples"]),
    ):
        if asked != found:
            raise InputError(_mismatch(resumed, option, asked, found))
    return plan


def data_order_facts(sampler: GlobalBatchSampler) -> dict[str, Any]:
    """Return the facts of the data order that a checkpoint keeps."""
    return {
        "order": ORDER_VERSION,
        "total_steps": sampler.total,
        "samples": sampler.samples,
        "last_batch": sampler.last_batch,
        "total_samples": sampler.seen(sampler.total),
        "sampler": None if sampler.order is None else order_digest(sampler.order),
    }


def check_same_data_order(resumed: Loaded, sampler: GlobalBatchSampler, *, scheduled: bool) -> None:
    """Check that the remaining batches are those of the interrupted run.

    Args:
        resumed: the checkpoint.
        sampler: the batches of this run.
        scheduled: whether the workload has a schedule, which is built for a fixed number of steps.

    Raises:
        InputError: they differ; names the difference.
    """
    facts, total = resumed.facts, resumed.facts["total_steps"]
    order = facts.get("order", 1)
    if order != ORDER_VERSION:
        raise InputError(
            f"this autobatch draws the data in version {ORDER_VERSION} of the order, but the checkpoint "
            f"{resumed.path} was begun with version {order}, so samples would repeat or be left out: resume "
            "with the autobatch that began the run, or start without --resume"
        )
    if facts["samples"] != sampler.samples:
        raise InputError(
            f"the training data have {sampler.samples:,} samples, but had {facts['samples']:,} at the "
            f"checkpoint {resumed.path}, so the order of the data would change: give the same data, or start "
            "without --resume"
        )
    digest = None if sampler.order is None else order_digest(sampler.order)
    if facts.get("sampler") != digest:
        raise InputError(
            f"the sampler draws another order than at the checkpoint {resumed.path}, so samples would repeat "
            "or be left out: give the same sampler, or start without --resume"
        )
    if facts["last_batch"] != sampler.last_batch:
        raise InputError(_mismatch(resumed, "--last-batch", sampler.last_batch, facts["last_batch"]))
    if scheduled and total != sampler.total:
        raise InputError(
            f"this run has {sampler.total} optimizer steps, but the checkpoint {resumed.path} has a schedule "
            f"for {total}: give the same --steps or --epochs, or start without --resume"
        )
    done = resumed.state["counters"]["batches_seen"]
    if done > sampler.total:
        raise InputError(
            f"this run has {sampler.total} optimizer steps, but the checkpoint {resumed.path} has taken "
            f"{done} already: give the same --steps or --epochs, or more"
        )
    if done == total and facts["total_samples"] != sampler.seen(done):
        raise InputError(
            f"this run goes beyond the checkpoint {resumed.path}, whose last batch was smaller than "
            f"{sampler.target_batch}: give the same --epochs, or start without --resume"
        )


def changes_since_checkpoint(
    resumed: Loaded,
    key: Mapping[str, Any],
    plan: Plan,
    ranks: Ranks,
    *,
    max_micro_batch: int | None,
    set_budget: int | None,
) -> list[str]:
    """Return the changes that rule out a bit-exact resume, in the user's words; each rank has its own.

    Args:
        resumed: the checkpoint.
        key: describes this device.
        plan: of the checkpoint.
        ranks: that train.
        max_micro_batch: as asked.
        set_budget: bytes that the user gave, and not those that are free now, which differ each time.
    """
    stored = resumed.facts["ranks"]
    if len(stored) != ranks.world:
        return ["number of ranks"]
    stored = stored[ranks.rank]
    changes = [name for entry, name in _BIT_EXACT_KEYS.items() if stored.get(entry) != key.get(entry)]
    if max_micro_batch is not None and max_micro_batch < plan.micro_batch:
        changes.append("--max-micro-batch")
    if set_budget is not None and set_budget < stored.get("budget_bytes", 0):
        changes.append("--memory-budget")
    return changes


def _not_enough_memory(folder: Path, error: Exception) -> str:
    path = list_checkpoints(folder)[-1]
    size = sum(file.stat().st_size for file in path.iterdir())
    return (
        f"not enough memory to resume from {path}: its state takes {format_bytes(size)} of host memory, "
        f"found {available_host_memory()} available: {first_line(error).rstrip('.')}. "
        "Free host memory, then resume again"
    )


def _mismatch(resumed: Loaded, option: str, asked: object, found: object) -> str:
    given = f"no {option}" if asked is None else f"{option} {asked}"
    return (
        f"{given} does not match the checkpoint {resumed.path}, which has "
        f"{'none' if found is None else found}: give the same, or start without --resume"
    )
