"""Construction of the training loop from the options and the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from autobatch.core.errors import InputError
from autobatch.core.knobs import LOADER_WORKERS
from autobatch.core.options import Options
from autobatch.core.records import Plan
from autobatch.device.base import Meter
from autobatch.distributed.engine import Shared, Whole
from autobatch.distributed.group import Group
from autobatch.distributed.ranks import Ranks
from autobatch.rehearsal.setup import Setup
from autobatch.step.gradients import Optimizers
from autobatch.step.train_state import TrainState, build_train_state
from autobatch.training.loop import Loop
from autobatch.training.validation import check_validation
from autobatch.workload.contract import Collated, Workload, kind_of, schedule_arguments
from autobatch.workload.data import load_micro_batch
from autobatch.workload.feed import open_feed
from autobatch.workload.nested import to_device
from autobatch.workload.order import GlobalBatchSampler
from autobatch.workload.rng import seed_everything, seed_rank
from autobatch.workload.split import split_of
from autobatch.workload.user_code import user_code

FILLER_SAMPLES = 2
"""Samples of a micro-batch that adds nothing to a batch: BatchNorm needs two."""


@contextmanager
def open_loop(
    setup: Setup,
    plan: Plan,
    options: Options,
    sampler: GlobalBatchSampler,
    ranks: Ranks,
    *,
    sample_seeds: bool = False,
    note: Callable[[str], None] = lambda _: None,
) -> Iterator[Loop]:
    """Build a loop at its first batch, on the device and with its feed; close both at the end of the block.

    Raises:
        InputError: a part of the workload is invalid, or raised on the first validation samples.
    """
    device = setup.device
    split = split_of(plan, setup.worst_case.sizes, rank=ranks.rank, world=ranks.world)
    workload = setup.workload
    workers = options.workers
    if workers is None:
        workers = int(plan.knobs.get(LOADER_WORKERS) or workload.workers or 0)
    feeding = open_feed(
        workload,
        sampler,
        split,
        workers=workers,
        device=device.torch_device,
        seeds_samples=sample_seeds,
    )
    with device.training() as meter, feeding as feed:
        seed_everything(options.seed)
        train_state = _open_train_state(setup, plan, meter, ranks)

        def filler() -> Collated:
            """Return the first samples, for a rank with fewer micro-batches than others."""
            ids = range(min(FILLER_SAMPLES, len(setup.workload.train_data)))  # type: ignore[arg-type]
            return to_device(load_micro_batch(setup.workload, ids), device.torch_device)

        if train_state.mesh is not None:
            engine: Whole = Shared(ranks, train_state, filler)
        else:
            engine = Whole(ranks, train_state)
            ranks.send([*train_state.model.parameters(), *train_state.model.buffers()])
        if ranks.rank:
            seed_rank(options.seed, ranks.rank)
        loop = Loop(
            workload=workload,
            train_state=train_state,
            sampler=sampler,
            device=device,
            meter=meter,
            micro_batch=plan.largest_micro_batch,
            split=split,
            engine=engine,
            feed=feed,
            schedules=build_schedules(workload, train_state.optimizers, sampler),
            on_nonfinite=options.on_nonfinite,
        )
        for line in check_validation(loop):
            note(line)
        if device.allocator_config is not None:
            # The first step starts with an empty cache, as a probe does.
            device.release()
        yield loop


def _open_train_state(setup: Setup, plan: Plan, meter: Meter, ranks: Ranks) -> TrainState:
    """Place the model on the device of this rank, and build what its steps need."""
    meter.mark("setup")
    device = setup.device.torch_device
    if plan.parallel == "shard" and isinstance(ranks, Group):
        # Only here: importing FSDP takes a second.
        from autobatch.distributed.shard import shard_over

        model, shared = shard_over(ranks, setup.model, plan.precision, device)
    else:
        model, shared = setup.model.to(device), None
    meter.count(tensor.data for tensor in [*model.parameters(), *model.buffers()])
    settings = replace(setup, precision=plan.precision, knobs=plan.knobs)
    train_state = build_train_state(setup.workload, model, device, settings, learning_rate=plan.learning_rate)
    if shared is not None:
        shared.attach(train_state)
    return train_state


def build_schedules(
    workload: Workload, optimizers: Optimizers, sampler: GlobalBatchSampler
) -> list[LRScheduler]:
    """Build a schedule for each optimizer; empty if the workload has no schedule.

    Raises:
        InputError: the function returns no schedule, or takes something else.
    """
    make: Any = workload.schedule
    if make is None:
        return []
    takes = schedule_arguments(make)
    steps = [sampler.total] if "steps" in takes else []
    with user_code("schedule", make):
        schedules = [
            make(optimizer, *steps) if takes else LambdaLR(optimizer, make) for optimizer in optimizers
        ]
        for schedule in schedules:
            has_methods = hasattr(schedule, "step") and hasattr(schedule, "state_dict")
            if not has_methods or isinstance(schedule, ReduceLROnPlateau):
                raise InputError(
                    "Workload(schedule=…) must return a schedule of torch.optim that depends on the step "
                    "number alone, because it is stepped after every optimizer step, found "
                    f"{kind_of(schedule)}"
                )
    return schedules
