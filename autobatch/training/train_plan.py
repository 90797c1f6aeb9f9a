"""Training of a plan: check the loss, build the loop, resume, train, validate and export."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
from torch import nn

from autobatch.core.progress import Progress
from autobatch.core.records import Plan, Training
from autobatch.core.version import versions
from autobatch.device.oom import memory_named
from autobatch.probing.attempt import TrainSetup
from autobatch.probing.setup import with_knobs
from autobatch.training.build import LoopSettings, open_loop
from autobatch.training.checkpoint import Loaded
from autobatch.training.loop_state import restore_loop
from autobatch.training.preflight import check_loss_splits
from autobatch.training.resume import data_order_facts
from autobatch.training.run import RunSettings, train
from autobatch.training.watch_split import SplitWatch
from autobatch.workload.order import GlobalBatchSampler


@dataclass(frozen=True, kw_only=True)
class Resume:
    """A checkpoint to continue from."""

    checkpoint: Loaded
    is_exact: bool
    """Whether hardware, plan and versions are those of the checkpoint, so that the rest is bit-identical."""


@memory_named("the training was prepared")
def train_plan(
    setup: TrainSetup,
    plan: Plan,
    sampler: GlobalBatchSampler,
    loop_settings: LoopSettings,
    run_settings: RunSettings,
    *,
    key: Mapping[str, Any],
    split_check: Literal["error", "note", "off"],
    progress: Progress,
    resume: Resume | None = None,
) -> tuple[Training, nn.Module]:
    """Train a plan to the end of its run.

    Args:
        setup: the model, which is trained in place, the data and the device.
        plan: the plan.
        sampler: the batches of the run.
        loop_settings: settings of the loop.
        run_settings: what the run writes, and when.
        key: what the limit depends on; stored beside every checkpoint.
        split_check: what to do if the loss cannot be split exactly.
        progress: receives notes and steps.
        resume: the checkpoint to continue from; None for a new run.

    Returns:
        The record of the training, and the trained model.

    Raises:
        InputError: a part of the workload is invalid, or its loss cannot be split into micro-batches.
        AutobatchError: see `autobatch.training.run.train`.
    """
    setup = with_knobs(setup, plan.knobs)
    progress.doing("checking that the loss can be split into micro-batches")
    notes, found = check_loss_splits(setup, micro_batch=plan.micro_batch, sampler=sampler, check=split_check)
    for line in notes:
        progress.note(line)
    watch = None
    if split_check != "off":
        watch = SplitWatch(setup, check=split_check, note=progress.note, before=found)
    checkpoint = None if resume is None else resume.checkpoint
    seeded_before = None if checkpoint is None else bool(checkpoint.facts.get("sample_seeds"))
    progress.doing("preparing the training")
    with open_loop(
        setup, plan, loop_settings, sampler, seeded_before=seeded_before, note=progress.note
    ) as loop:
        if resume is not None:
            restore_loop(loop, resume.checkpoint.state, same_hardware=resume.is_exact)
        facts = {
            "plan": msgspec.to_builtins(plan),
            "key": dict(key),
            "seed": loop_settings.seed,
            "warmup_samples": loop_settings.warmup_samples,
            **data_order_facts(sampler),
            "versions": versions(),
            "sample_seeds": loop.feed is not None,
        }
        progress.doing("training: the first step")
        record = train(loop, replace(run_settings, facts=facts), progress, checkpoint, watch)
    return record, loop.train_state.model
