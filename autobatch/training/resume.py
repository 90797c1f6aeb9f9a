"""State of a run in a checkpoint: captured from the loop, checked, and restored if the run is the same.

Counters in a checkpoint:

- ``batches_seen``: batches trained so far, whether their step was applied or not.
- ``steps_applied``: optimizer steps among them; the others are the ``skipped_steps`` of a run's summary.
- ``skipped_steps_in_a_row``: steps skipped since the last applied one because they were not finite.
- ``oom_recoveries``: batches that ran again in smaller micro-batches.

``micro_batch`` has the largest one of all ranks, which shrinks with each recovery, and ``random`` the
state of its generators.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from torch import Tensor, nn

from autobatch.core.errors import AutobatchError, CheckpointError, DoesNotFitError, InputError
from autobatch.core.options import Options
from autobatch.core.records import Count, Plan, Positive, RunRecord
from autobatch.core.text import error_text, quoted
from autobatch.core.units import format_bytes
from autobatch.device.oom import first_line, is_oom
from autobatch.distributed.rank_plan import layout_of
from autobatch.distributed.ranks import Ranks
from autobatch.rehearsal.setup import Setup, device_key
from autobatch.step.ema import load_average
from autobatch.step.gradients import is_sharded
from autobatch.step.train_state import TrainState
from autobatch.training.checkpoint import (
    MANIFEST,
    Loaded,
    available_host_memory,
    clean_leftovers,
    list_checkpoints,
    load_newest,
)
from autobatch.training.loop import Loop
from autobatch.training.run_folder import CHECKPOINTS
from autobatch.training.state_file import STATE, replace_sharded, sharded_tensors
from autobatch.workload.data_digest import DataDigest
from autobatch.workload.nested import tensors_of
from autobatch.workload.order import ORDER_VERSION, GlobalBatchSampler, LastBatch, order_digest
from autobatch.workload.rng import (
    capture_random_state,
    plain_random_state,
    random_state_of,
    restore_random_state,
    seed_rank,
)
from autobatch.workload.split import digest_of
from autobatch.workload.user_code import failed_part

BEFORE_TRAINING = ("device", "probe", "tuning", "title", "predicted", "memory_curve")
"""Records of the parts before the training, which every checkpoint keeps for a resume."""
STATE_DICT_ERROR = "Error(s) in loading state_dict for "
"""Beginning of torch's error about a state dict; the parameters follow in further lines."""
_BIT_EXACT_KEYS = {
    "device": "device",
    "device_kind": "kind of device",
    "total_bytes": "size of its memory",
    "torch": "torch",
    "precision": "--precision",
    "gradient_dtype": "--gradient-dtype",
}
"""Entries of the setup's key that a bit-exact resume depends on, with their names in messages."""


class _Key(msgspec.Struct):
    """The part of the key of a setup that a run trusts; other entries are only compared."""

    budget_bytes: Positive | None = None


class _Facts(msgspec.Struct):
    """The facts of a checkpoint; see `autobatch.training.run.train_plan`."""

    plan: Plan
    seed: int
    warmup_samples: Positive | None
    total_steps: Positive
    samples: Positive
    last_batch: LastBatch
    total_samples: Positive
    ranks: list[dict[str, Any]]
    key: _Key
    order: int
    sampler: str | None = None
    sample_seeds: bool = False
    notes: list[str] = []
    failed_checkpoints: list[int] = []
    times: dict[str, dict[str, float]] = {}
    data: DataDigest | None = None
    records: dict[str, Any] = {}


class _Counters(msgspec.Struct):
    """The counters of a loop, which has fields of the same names."""

    batches_seen: Count
    steps_applied: Count
    oom_recoveries: Count
    skipped_steps_in_a_row: Count


class _State(msgspec.Struct):
    """The part of a state whose form does not depend on the workload; see `capture_loop`."""

    counters: _Counters
    model: dict[str, Any]
    buffers: dict[str, Any]
    optimizers: list[dict[Any, Any]]
    schedules: list[dict[Any, Any]]
    scaler: dict[str, Any] | None
    average: dict[str, Any] | None
    items_per_sample: Annotated[float, Meta(gt=0)] | None
    random: list[dict[str, Any]]
    micro_batch: Positive


def capture_loop(loop: Loop) -> dict[str, Any]:
    """Return everything that the rest of a run depends on, between two steps; all ranks call it."""
    train_state = loop.train_state
    return {
        "model": train_state.model.state_dict(),
        "buffers": _unsaved_buffers(train_state.model),
        "names": _parameter_names(train_state),
        "optimizers": [optimizer.state_dict() for optimizer in train_state.optimizers],
        "schedules": [schedule.state_dict() for schedule in loop.schedules],
        "scaler": None if train_state.scaler is None else train_state.scaler.state_dict(),
        "average": None if train_state.average is None else train_state.average.state_dict(),
        "items_per_sample": train_state.items_per_sample,
        "stream": loop.sampler.state_dict(),
        "random": loop.engine.ranks.gather(plain_random_state()),
        "micro_batch": loop.micro_batch,
        "counters": {name: getattr(loop, name) for name in _Counters.__struct_fields__},
    }


def restore_loop(
    loop: Loop, state: Mapping[str, Any], *, same_hardware: bool, folder: Path | None = None
) -> list[str]:
    """Restore a state that `capture_loop` returned, and return notes on how.

    Args:
        loop: a loop of the same workload.
        state: what `capture_loop` returned.
        same_hardware: also restore the micro-batch and the random states of the GPUs, so that the rest of the
            run is bit-exact. Otherwise the loop keeps its micro-batch, and the batches are still the same.
        folder: of the checkpoint, which may have a part of the state; None if it has none.

    Raises:
        InputError: the state belongs to another model, optimizer or schedule.
        DoesNotFitError: memory runs out while it is restored.
    """
    try:
        _restore_train_state(loop, _with_shards(loop, state, folder))
        _restore_random(loop, state, same_hardware=same_hardware)
    except AutobatchError:
        raise
    except Exception as error:  # a user's optimizer or schedule may raise anything
        if is_oom(error):
            raise DoesNotFitError(_not_enough_memory(loop, state, error)) from error
        raise InputError(
            f"the checkpoint was written with another model, optimizer or schedule ({_difference(error)}). "
            "Give the same workload, or start without --resume"
        ) from error
    for name, count in state["counters"].items():
        setattr(loop, name, count)
    if same_hardware:
        loop.micro_batch = state["micro_batch"]
    return loop.sampler.load_state_dict(state["stream"])


def fails_on_state(loop: Loop, resumed: Loaded, error: Exception) -> bool:
    """Return whether an error is that of the first step after a resume, in what a checkpoint has state of."""
    is_first = loop.batches_seen == resumed.state["counters"]["batches_seen"]
    return is_first and failed_part(error) in ("optimizer", "schedule")


def _parameter_names(train_state: TrainState) -> dict[str, Any]:
    """Return the names of the parameters that optimizers and the average know by number."""
    known = {parameter: name for name, parameter in train_state.model.named_parameters()}

    def names_of(parameters: Iterable[Tensor]) -> list[str]:
        return [known.get(one, f"parameter-{number}") for number, one in enumerate(parameters)]  # type: ignore[call-overload]

    return {
        "optimizers": [
            names_of(p for group in optimizer.param_groups for p in group["params"])
            for optimizer in train_state.optimizers
        ],
        "average": names_of(train_state.parameters),
    }


def _with_shards(loop: Loop, state: Mapping[str, Any], folder: Path | None) -> Mapping[str, Any]:
    """Return a state with all of its tensors, sharded as those of the loop."""
    wanted, mesh = sharded_tensors(state), loop.engine.mesh
    if not wanted and mesh is None:
        return state
    # Only here: one process needs no torch.distributed.
    from autobatch.distributed.sharding.state import read_shards, shard_like, sharded_parameters

    if wanted:
        assert folder is not None
        # The weights are read in place.
        forms = {name: (one.shape, one.dtype, one.dim) for name, one in wanted.items()}
        tensors = read_shards(folder, forms, mesh=mesh, into=sharded_parameters(loop.train_state))
        state = replace_sharded(dict(state), lambda one: tensors[one.name])
    return state if mesh is None else shard_like(loop.train_state, state, mesh)


def _restore_random(loop: Loop, state: Mapping[str, Any], *, same_hardware: bool) -> None:
    """Restore the random states of this rank, or seed it anew if the checkpoint has no such rank."""
    rank, of_ranks = loop.engine.ranks.rank, state["random"]
    if rank >= len(of_ranks):
        seed_rank(loop.sampler.seed, rank, state["counters"]["batches_seen"])
        return
    saved, current = random_state_of(of_ranks[rank]), capture_random_state()
    cuda = saved.cuda if same_hardware and len(saved.cuda) == len(current.cuda) else []
    restore_random_state(current._replace(**saved._replace(cuda=cuda)._asdict()))


def _restore_train_state(loop: Loop, state: Mapping[str, Any]) -> None:
    train_state = loop.train_state
    weights = train_state.model.state_dict()  # has the versions of the modules as an attribute
    for name, tensor in state["model"].items():
        own = weights.get(name)
        if isinstance(own, Tensor) and own.is_floating_point() != tensor.is_floating_point():
            raise ValueError(f"{name} is of type {own.dtype} here and {tensor.dtype} in the checkpoint")
    weights.clear()
    weights.update(state["model"])
    train_state.model.load_state_dict(weights)
    _load_buffers(train_state.model, state["buffers"], train_state.device)
    for optimizer, saved in zip(train_state.optimizers, state["optimizers"], strict=True):
        _load_optimizer(optimizer, saved)
    for schedule, saved in zip(loop.schedules, state["schedules"], strict=True):
        _check_settings("schedule", saved, schedule.state_dict())
        schedule.load_state_dict(saved)
    load_average(train_state.average, state["average"])
    if train_state.scaler is not None and state["scaler"]:
        train_state.scaler.load_state_dict(state["scaler"])
    train_state.items_per_sample = state["items_per_sample"]


def _difference(error: Exception) -> str:
    """Return an error in one line; of torch's about a state dict, the parameters that do not match."""
    line = first_line(error)
    return error_text(error).partition(": ")[2] if line.startswith(STATE_DICT_ERROR) else line


def _not_enough_memory(loop: Loop, state: Mapping[str, Any], error: Exception) -> str:
    shared = sum(one.nbytes for one in sharded_tensors(state).values())
    own = shared if loop.engine.mesh is None else -(-shared // loop.engine.ranks.world)
    size = sum(tensor.nbytes for tensor in tensors_of(dict(state))) + own
    return (
        f"not enough memory to resume: the state of the checkpoint takes {format_bytes(size)}, and the "
        f"memory budget is {format_bytes(loop.device.budget_bytes)}: {first_line(error).rstrip('.')}. The "
        "checkpoint is intact: free memory, or give a larger --memory-budget, then resume again"
    )


def _unsaved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a state dict leaves out; a forward pass may change them too."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name not in saved}


def _load_buffers(model: nn.Module, saved: Mapping[str, Tensor], device: torch.device) -> None:
    for full_name, value in saved.items():
        path, _, name = full_name.rpartition(".")
        module = model.get_submodule(path)
        buffer = getattr(module, name, None)
        if buffer is not None and buffer.shape == value.shape and buffer.dtype == value.dtype:
            buffer.copy_(value)
        else:
            module.register_buffer(name, value.to(device), persistent=False)


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load optimizer state exactly, in the layout of its parameters.

    torch would round float32 state of 16-bit parameters to 16 bits. Files keep no layout in memory, and fused
    optimizers need that of the parameter.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    if not saved["state"].keys() <= set(numbers):
        raise ValueError("the optimizer has state of parameters that no group has")
    for group, own in zip(saved["param_groups"], optimizer.state_dict()["param_groups"], strict=True):
        _check_settings("parameter group", group, own)
    optimizer.load_state_dict(saved)
    for number, parameter in zip(numbers, parameters, strict=True):
        for name, value in saved["state"].get(number, {}).items():
            if not isinstance(value, Tensor):
                continue
            device = optimizer.state[parameter][name].device
            if value.shape == parameter.shape and not is_sharded(value):
                made = torch.empty_like(parameter.detach(), dtype=value.dtype, device=device)
                optimizer.state[parameter][name] = made.copy_(value)
            elif optimizer.state[parameter][name].dtype != value.dtype:
                optimizer.state[parameter][name] = value.to(device, copy=True)


def _check_settings(what: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise a `ValueError` if a stored setting has another type than the same one of this run."""
    if own and not own.keys() & saved.keys():
        raise ValueError(f"the {what} of the checkpoint has no {next(iter(own))}")
    for name in own.keys() & saved.keys():
        if not _is_alike(saved[name], own[name]):
            raise ValueError(
                f"the {what} has {name} {quoted(own[name])} here and {quoted(saved[name])} in the checkpoint"
            )


def _is_alike(saved: Any, own: Any) -> bool:
    """Return whether a stored value may follow from a value that is as it began."""
    match own:
        case bool():
            alike = saved is None or isinstance(saved, bool)
        case Tensor() | Real():
            is_number = isinstance(saved, Real) and not isinstance(saved, bool)
            is_possible = is_number and (math.isfinite(saved) or not math.isfinite(own))
            alike = isinstance(saved, Tensor) or is_possible
        case tuple():
            alike = isinstance(saved, tuple) and len(saved) == len(own) and all(map(_is_alike, saved, own))
        case list():
            alike = isinstance(saved, list) and all(map(_is_alike, saved, own))
        case dict():
            alike = isinstance(saved, dict) and all(
                _is_alike(saved[key], own[key]) for key in own.keys() & saved.keys()
            )
        case _:
            alike = own is None or isinstance(saved, type(own))
    return alike


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
        raise DoesNotFitError(_not_enough_host_memory(folder, error)) from error
    if loaded is None:
        raise InputError(f"--resume found no checkpoint in {folder}: start without --resume")
    return loaded


class _StoredRecords(RunRecord, frozen=True, kw_only=True):
    profile: str | None = None


def stored_records(facts: Mapping[str, Any]) -> _StoredRecords | None:
    """Return the records of the parts before the training; None if a checkpoint has none.

    Raises:
        ValueError: they are no such records.
    """
    stored = {name: one for name, one in facts.get("records", {}).items() if one is not None}
    names = (*BEFORE_TRAINING, "profile")
    given = {name: stored[name] for name in names if name in stored}
    return msgspec.convert(given, _StoredRecords) if "device" in given else None


def check_content(path: Path, state: Any, facts: Mapping[str, Any]) -> None:
    """Check that a checkpoint with valid sums holds a state that a run can continue from.

    Args:
        path: its folder, whose name has the number of its batches.
        state: what `capture_loop` returned.
        facts: what `autobatch.training.run.train_plan` stored beside it.

    Raises:
        CheckpointError: an entry is missing, has another type, or is out of its range; names it.
    """
    name = MANIFEST
    try:
        msgspec.convert(facts, _Facts)
        stored_records(facts)
        name = STATE
        found = msgspec.convert(state, _State)
        for one in found.random:
            random_state_of(one)
    except (ValueError, TypeError, LookupError) as error:  # with msgspec.ValidationError
        raise CheckpointError(f"{path}: {name} holds no run to resume: {error}") from None
    step, counters = int(path.name.removeprefix("step-")), found.counters
    if counters.batches_seen != step:
        raise CheckpointError(f"{path}: {name} has the state of step {counters.batches_seen}, not {step}")
    if counters.steps_applied + counters.skipped_steps_in_a_row > step:
        raise CheckpointError(f"{path}: {name} counts more steps than the {step} of its name")


def load_plan(resumed: Loaded, options: Options) -> Plan:
    """Return the plan that the run was started with.

    Raises:
        InputError: the target batch, the seed or the warm-up differs.
    """
    facts = resumed.facts
    plan = msgspec.convert(facts["plan"], Plan)
    _check_equal(
        resumed,
        ("--target-batch", options.target_batch, plan.target_batch, "the same"),
        ("--seed", options.device.seed, facts["seed"], "the same"),
        ("--warmup-samples", options.train.warmup_samples, facts["warmup_samples"], "the same"),
    )
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
        scheduled: whether the workload has a schedule that is built for the number of steps of the run.

    Raises:
        InputError: they differ; names the difference.
    """
    before, now = resumed.facts, data_order_facts(sampler)
    _check_equal(
        resumed,
        ("version of the data order", ORDER_VERSION, before["order"], "the run its own autobatch"),
        ("number of training samples", now["samples"], before["samples"], "the same data"),
        ("order of the sampler", now["sampler"], before.get("sampler"), "the same sampler"),
        ("--last-batch", now["last_batch"], before["last_batch"], "the same"),
    )
    done, steps = resumed.state["counters"]["batches_seen"], before["total_steps"]
    if scheduled:
        what = "number of optimizer steps, which the schedule was built for,"
        _check_equal(resumed, (what, sampler.total, steps, "the same --steps or --epochs"))
    if done > sampler.total:
        raise InputError(
            f"this run has {sampler.total} optimizer steps, but the checkpoint {resumed.path} has taken "
            f"{done} already: give the same --steps or --epochs, or more"
        )
    if done == steps:
        # The last batch of the run may have been short, and would be full in a longer run.
        what = f"number of samples in {done} optimizer steps"
        _check_equal(resumed, (what, sampler.seen(done), before["total_samples"], "the same --epochs"))


def changes_since_checkpoint(
    resumed: Loaded, setup: Setup, sampler: GlobalBatchSampler, ranks: Ranks, options: Options
) -> list[str]:
    """Return the changes that rule out a bit-exact resume, in the user's words; each rank has its own.

    Args:
        resumed: the checkpoint.
        setup: the workload and the device of this rank.
        sampler: the batches of this run.
        ranks: that train.
        options: as asked.
    """
    changes: list[str] = []
    plan = msgspec.convert(resumed.facts["plan"], Plan)
    of_ranks = resumed.facts["ranks"]
    if len(of_ranks) == ranks.world:
        key, stored = device_key(setup), of_ranks[ranks.rank]
        changes += [name for entry, name in _BIT_EXACT_KEYS.items() if stored.get(entry) != key.get(entry)]
        if (options.search.max_micro_batch or plan.micro_batch) < plan.micro_batch:
            changes.append("--max-micro-batch")
        # What the user gave, and not what is free now, which differs each time.
        is_set = options.device.memory_budget is not None
        if is_set and setup.device.budget_bytes < resumed.facts["key"].get("budget_bytes", 0):
            changes.append("--memory-budget")
    else:
        changes.append("number of ranks")
    if options.batch.split not in ("auto", plan.split):
        changes.append("--split")
    sizes = setup.worst_case.sizes() if plan.size_cut is not None else None
    if plan.size_cut is not None and (sizes is None or digest_of(sizes) != plan.size_cut.digest):
        changes.append("sizes of the samples")
    return changes if setup.layout == layout_of(plan) else [*changes, "--parallel"]


def _not_enough_host_memory(folder: Path, error: Exception) -> str:
    path = list_checkpoints(folder)[-1]
    size = sum(file.stat().st_size for file in path.iterdir())
    return (
        f"not enough memory to resume from {path}: its state takes {format_bytes(size)} of host memory, "
        f"found {available_host_memory()} available: {first_line(error).rstrip('.')}. "
        "Free host memory, then resume again"
    )


def _check_equal(resumed: Loaded, *rows: tuple[str, object, object, str]) -> None:
    """Check that what is asked for, the second of each row, is what the checkpoint has, the third.

    Raises:
        InputError: a row differs; names its first and, as what to give, its last element.
    """
    for what, asked, found, remedy in rows:
        if asked != found:
            given = f"no {what}" if asked is None else f"{what} {asked}"
            raise InputError(
                f"{given} does not match the checkpoint {resumed.path}, which has "
                f"{'none' if found is None else found}: give {remedy}, or start without --resume"
            )
