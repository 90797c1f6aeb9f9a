"""State of a run in a checkpoint: captured from the loop, checked, and restored if the run is the same.

Counters in a checkpoint:

- ``batches_seen``: batches trained so far, whether their step was applied or not.
- ``steps_applied``: optimizer steps among them; the others are the ``skipped_steps`` of a run's summary.
- ``skipped_steps_in_a_row``: steps skipped since the last applied one because they were not finite.
- ``oom_recoveries``: batches that ran again after an out-of-memory error.

``micro_batch`` has the largest one of all ranks, which shrinks with a recovery, ``random`` the generators of
each rank, and ``frozen`` and ``evaluated`` the names of the parameters and modules that do not train.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from autobatch.core.errors import AutobatchError, InputError
from autobatch.core.options import Options
from autobatch.core.records import Plan
from autobatch.core.text import error_text
from autobatch.device.oom import is_oom, memory_named
from autobatch.distributed.ranks import Ranks
from autobatch.rehearsal.setup import Setup, device_key
from autobatch.step.gradients import is_sharded
from autobatch.training.checkpoint import SHARDED, Loaded
from autobatch.training.loop import Loop
from autobatch.workload.contract import schedule_arguments
from autobatch.workload.data import digest_of
from autobatch.workload.nested import map_leaves
from autobatch.workload.order import ORDER_VERSION, GlobalBatchSampler
from autobatch.workload.rng import (
    RandomState,
    capture_random_state,
    mix_seed,
    restore_random_state,
    seed_everything,
)

BEFORE_TRAINING = ("device", "probe", "tuning", "title", "memory_curve")
"""Records of the parts before the training, which every checkpoint keeps for a resume."""
SAMPLES = "number of samples in the steps so far"
COUNTERS = ("batches_seen", "steps_applied", "oom_recoveries", "skipped_steps_in_a_row")
"""Counters of a loop, which has fields of the same names."""


def capture_loop(loop: Loop) -> dict[str, Any]:
    """Return everything that the rest of a run depends on, between two steps; all ranks call it."""
    train_state = loop.train_state
    model, scaler, average = train_state.model, train_state.scaler, train_state.average
    return {
        "model": model.state_dict(keep_vars=True),
        # A state dict leaves some out, and a new model may not have those that a forward pass has made.
        "buffers": dict(model.named_buffers()),
        "frozen": [name for name, parameter in model.named_parameters() if not parameter.requires_grad],
        "evaluated": [name for name, module in model.named_modules() if not module.training],
        "optimizers": [optimizer.state_dict() for optimizer in train_state.optimizers],
        "schedules": [schedule.state_dict() for schedule in loop.schedules],
        "scaler": scaler.state_dict(),
        "average": None if average is None else average.state_dict(),
        "stream": loop.sampler.state_dict(),
        "random": loop.engine.ranks.gather(capture_random_state().plain()),
        "micro_batch": loop.micro_batch,
        "counters": {name: getattr(loop, name) for name in COUNTERS},
    }


def restore_loop(loop: Loop, resumed: Loaded, *, same_hardware: bool) -> list[str]:
    """Restore the state of a checkpoint, as `capture_loop` returned it, and return notes on how.

    Args:
        loop: a loop of the same workload.
        resumed: the checkpoint.
        same_hardware: also restore the micro-batch and the random states of the GPUs, so that the rest of the
            run is bit-exact. Otherwise the loop keeps its micro-batch, and the batches are still the same.

    Raises:
        InputError: the state belongs to another model, optimizer or schedule.
        DoesNotFitError: memory runs out while it is restored.
    """
    state = resumed.state
    with memory_named("the state of a checkpoint, which is intact, was loaded into the model"):
        try:
            _restore_train_state(loop, _with_shards(loop, resumed))
            _restore_random(loop, state, same_hardware=same_hardware)
        except AutobatchError:
            raise
        except Exception as error:  # a user's optimizer or schedule may raise anything
            if is_oom(error):
                raise
            raise InputError(
                "the checkpoint was written with another model, optimizer or schedule "
                f"({type(error).__name__}: {error_text(error)}). Give the same workload, or start without "
                "--resume"
            ) from error
    for name, count in state["counters"].items():
        setattr(loop, name, count)
    if same_hardware:
        loop.micro_batch = state["micro_batch"]
    return loop.sampler.load_state_dict(state["stream"])


def _with_shards(loop: Loop, resumed: Loaded) -> Mapping[str, Any]:
    """Return the state of a checkpoint with all of its tensors, sharded as those of the loop."""
    forms = resumed.state.get(SHARDED, {})
    if not forms:
        return resumed.state
    # Only here: one process needs no torch.distributed.
    from autobatch.distributed.shard import read_shards

    wanted = {name: tuple(form) for name, *form in forms.values()}
    tensors = read_shards(resumed.path, wanted, loop.train_state.model)
    whole: dict[str, Any] = map_leaves(
        {name: part for name, part in resumed.state.items() if name != SHARDED},
        lambda place, leaf: tensors[forms[place][0]] if place in forms else leaf,
    )
    return whole


def _restore_random(loop: Loop, state: Mapping[str, Any], *, same_hardware: bool) -> None:
    """Restore the random states of this rank, or seed it anew if the checkpoint has no such rank."""
    rank, of_ranks = loop.engine.ranks.rank, state["random"]
    if rank >= len(of_ranks):
        seed_everything(mix_seed(loop.sampler.seed, rank, state["counters"]["batches_seen"]))
        return
    saved = RandomState(**of_ranks[rank])
    is_same = same_hardware and len(saved.cuda) == len(capture_random_state().cuda)
    restore_random_state(saved if is_same else saved._replace(cuda=[]))


def _restore_train_state(loop: Loop, state: Mapping[str, Any]) -> None:
    train_state = loop.train_state
    model = train_state.model
    _load_buffers(model, state, train_state.device)
    weights = model.state_dict()  # has the versions of the modules as an attribute
    weights.clear()
    weights.update(state["model"])
    model.load_state_dict(weights)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in state["frozen"])
    for name, module in model.named_modules():
        module.training = name not in state["evaluated"]
    for optimizer, saved in zip(train_state.optimizers, state["optimizers"], strict=True):
        _load_optimizer(optimizer, saved)
    for schedule, saved in zip(loop.schedules, state["schedules"], strict=True):
        schedule.load_state_dict(saved)
    if train_state.average is not None:
        train_state.average.load_state_dict(state["average"])
    if state["scaler"]:
        train_state.scaler.load_state_dict(state["scaler"])


def _load_buffers(model: nn.Module, state: Mapping[str, Any], device: torch.device) -> None:
    """Load all buffers, also those that no state dict has, and make those that a forward pass registers."""
    for full_name, value in state["buffers"].items():
        path, _, name = full_name.rpartition(".")
        module = model.get_submodule(path)
        buffer = getattr(module, name, None)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            is_persistent = full_name in state["model"]
            module.register_buffer(name, value.to(device, copy=True), persistent=is_persistent)
        else:
            buffer.copy_(value)


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load optimizer state exactly, in memory of its own.

    torch would round float32 state of 16-bit parameters to 16 bits, and keep the tensors of the checkpoint,
    which are pages of its file. Fused optimizers need the layout of the parameter.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    needed = {name for group in optimizer.param_groups for name in group}
    optimizer.load_state_dict(saved)
    if missing := needed.difference(*optimizer.param_groups):
        raise ValueError(f"{type(optimizer).__name__} finds no {', '.join(sorted(missing))}")
    for number, parameter in zip(numbers, parameters, strict=True):
        for name, value in saved["state"].get(number, {}).items():
            if not isinstance(value, Tensor) or is_sharded(value):
                continue
            device = optimizer.state[parameter][name].device
            if value.shape == parameter.shape and not is_sharded(parameter):
                made = torch.empty_like(parameter.detach(), dtype=value.dtype, device=device)
                optimizer.state[parameter][name] = made.copy_(value)
            else:
                optimizer.state[parameter][name] = value.to(device, copy=True)


def run_facts(setup: Setup, sampler: GlobalBatchSampler) -> dict[str, Any]:
    """Return what tells the steps of a run from those of another, by its name in messages."""
    schedule = setup.workload.schedule
    is_scheduled = schedule is not None and "steps" in schedule_arguments(schedule)
    return {
        "--target-batch": sampler.target_batch,
        "--seed": sampler.seed,
        "--ema": setup.ema,
        "version of the data order": ORDER_VERSION,
        "number of training samples": sampler.samples,
        "order of the sampler": None if sampler.order is None else digest_of(sampler.order(0)),
        "number of optimizer steps of the schedule": sampler.total if is_scheduled else None,
        SAMPLES: sampler.seen(sampler.total),
    }


def check_same_run(resumed: Loaded, setup: Setup, sampler: GlobalBatchSampler) -> None:
    """Check that the remaining steps are those of the interrupted run.

    Raises:
        InputError: they differ; names the difference.
    """
    done = resumed.state["counters"]["batches_seen"]
    before, now = dict(resumed.facts["run"]), run_facts(setup, sampler)
    samples = min(before.pop(SAMPLES), done * before["--target-batch"])
    del now[SAMPLES]
    for name, value in now.items():
        if value != before[name]:
            raise InputError(
                f"{name} {value} does not match the checkpoint {resumed.path}, which has {before[name]}: "
                "give the same options, data, sampler and autobatch, or start without --resume"
            )
    if sampler.total < done:
        raise InputError(
            f"the checkpoint {resumed.path} has {done:,} steps behind it, and the run is to have "
            f"{sampler.total:,}: ask for more --steps or --epochs"
        )
    if sampler.seen(done) != samples:
        raise InputError(
            f"the run of the checkpoint {resumed.path} ended with a smaller batch, which is a full one in a "
            f"longer run ({samples:,} samples so far, and {sampler.seen(done):,}): start without --resume"
        )


def changes_since_checkpoint(resumed: Loaded, setup: Setup, ranks: Ranks, options: Options) -> list[str]:
    """Return the changes that rule out a bit-exact resume, in the user's words; each rank has its own."""
    plan, of_ranks = msgspec.convert(resumed.facts["plan"], Plan), resumed.facts["ranks"]
    stored, cut = of_ranks[min(ranks.rank, len(of_ranks) - 1)], plan.size_cut
    changes = {name: stored.get(name) != value for name, value in device_key(setup).items()}
    changes["--split"] = options.split not in ("auto", plan.split)
    sizes = None if cut is None else setup.worst_case.sizes()
    changes["sizes of the samples"] = cut is not None and (sizes is None or digest_of(sizes) != cut.digest)
    # What the user gave, and not what is free now, which differs each time.
    is_less = setup.device.budget_bytes < resumed.facts["records"]["device"]["budget_bytes"]
    changes["--memory-budget"] = options.memory_budget is not None and is_less
    changes["--max-micro-batch"] = (options.max_micro_batch or plan.micro_batch) < plan.micro_batch
    return [name for name, is_changed in changes.items() if is_changed]
