"""What a resumed run must have in common with the run that it goes on with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from autobatch.core.errors import InputError
from autobatch.core.records import Plan
from autobatch.training.build import LoopSettings
from autobatch.training.checkpoint import Loaded, clean_leftovers, load_newest
from autobatch.training.run_folder import CHECKPOINTS
from autobatch.workload.order import GlobalBatchSampler

_SAME = {
    "device": "device",
    "device_kind": "kind of device",
    "total_bytes": "size of its memory",
    "torch": "torch",
    "precision": "--precision",
}
"""What a run depends on bit for bit, by its name in the key of what fits."""


def load_run_state(out: Path) -> Loaded:
    """The newest checkpoint of a run.

    Raises:
        InputError: there is none.
    """
    clean_leftovers(out / CHECKPOINTS)
    loaded = load_newest(out / CHECKPOINTS)
    if loaded is None:
        raise InputError(f"--resume found no checkpoint in {out / CHECKPOINTS}: start without --resume")
    return loaded


def load_plan(resumed: Loaded, options: LoopSettings) -> Plan:
    """The plan that the run was started with.

    Raises:
        InputError: it cannot be read, or the options ask for another batch or another seed.
    """
    try:
        planned = msgspec.convert(resumed.facts["plan"], Plan)
    except (KeyError, msgspec.ValidationError) as error:
        raise InputError(f"{resumed.path} holds no plan that can be read: {error}") from None
    if planned.target_batch != options.target_batch:
        raise InputError(
            f"--target-batch {options.target_batch} does not match the run in {resumed.path}, which has a "
            f"target batch of {planned.target_batch}: give that, or start without --resume"
        )
    if resumed.facts.get("seed") != options.seed:
        raise InputError(
            f"--seed {options.seed} does not match the run in {resumed.path}, which has seed "
            f"{resumed.facts.get('seed')}: the order of the data would change"
        )
    warmup = resumed.facts.get("warmup_samples")
    if warmup != options.warmup_samples:
        raise InputError(
            f"--warmup-samples {options.warmup_samples} does not match the run in {resumed.path}, which has "
            f"{warmup}: give the same, or start without --resume"
        )
    return planned


def data_order_facts(sampler: GlobalBatchSampler) -> dict[str, Any]:
    """What a checkpoint keeps of the run's windows."""
    return {
        "windows": sampler.total,
        "samples": sampler.samples,
        "last_batch": sampler.last_batch,
        "samples_taken": sampler.seen(sampler.total),
    }


def check_same_data_order(resumed: Loaded, sampler: GlobalBatchSampler, *, scheduled: bool) -> None:
    """Make sure that the windows that are left are those that the run would have gone on with.

    Args:
        resumed: the checkpoint.
        sampler: the windows that are asked for now.
        scheduled: the workload has a schedule, which is made for so many steps and cannot go on for others.

    Raises:
        InputError: they are not; says what differs.
    """
    facts, run = resumed.facts, f"the run in {resumed.path}"
    samples = facts.get("samples", sampler.samples)
    if samples != sampler.samples:
        raise InputError(
            f"the training data have {sampler.samples:,} samples, and {run} has {samples:,}: the order of "
            "the data would change; give the same data, or start without --resume"
        )
    last_batch = facts.get("last_batch", sampler.last_batch)
    if last_batch != sampler.last_batch:
        raise InputError(
            f"--last-window {sampler.last_batch} does not match {run}, which has {last_batch}: give that, "
            "or start without --resume"
        )
    total = facts.get("windows")
    if scheduled and total != sampler.total:
        raise InputError(
            f"{run} and its schedule are for {total} optimizer steps, this is for {sampler.total}: give the "
            "same --steps or --epochs, or start without --resume"
        )
    done = resumed.state["counters"]["batches_seen"]
    if done > sampler.total:
        raise InputError(
            f"{run} has taken {done} optimizer steps already, and this is for {sampler.total}: give its own "
            "--steps or --epochs, or more"
        )
    taken = facts.get("samples_taken")
    if done == total and taken is not None and taken != sampler.seen(done):
        raise InputError(
            f"{run} ended with a short window, where one of {sampler.target_batch} would have stood: "
            "it cannot run on; start without --resume"
        )


def changes_since_checkpoint(
    resumed: Loaded, key: Mapping[str, Any], planned: Plan, max_micro_batch: int | None
) -> list[str]:
    """What forbids to take over what is the same bit for bit only where all else is the same; by name."""
    stored = resumed.facts.get("key", {})
    found = [said for name, said in _SAME.items() if stored.get(name) != key.get(name)]
    if max_micro_batch is not None and max_micro_batch < planned.micro_batch:
        found.append("--max-micro-batch")
    return found
