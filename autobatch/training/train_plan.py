"""Training of a plan: check the loss, build the loop, resume, train, validate and export."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from torch import nn

from autobatch.core.options import Options
from autobatch.core.progress import Progress
from autobatch.core.records import Plan, Training
from autobatch.core.units import GiB, format_bytes
from autobatch.core.version import versions
from autobatch.device.cpu import CpuDevice
from autobatch.device.oom import memory_named
from autobatch.distributed.rank_plan import limit_of_rank, share_of_rank
from autobatch.distributed.ranks import Alone, Ranks
from autobatch.setup.setup import Setup, device_key, with_knobs
from autobatch.training.build import open_loop, split_of
from autobatch.training.checkpoints.load import Loaded
from autobatch.training.loop import Loop
from autobatch.training.loop_state import restore_loop
from autobatch.training.resume import data_order_facts
from autobatch.training.run import train
from autobatch.training.run_folder import RunFiles
from autobatch.training.split_check.check import FirstBatch, SplitCheck, check_loss_splits
from autobatch.workload.order import GlobalBatchSampler
from autobatch.workload.streams import StreamSampler

MOST_CHECKED_BYTES = GiB
"""Bytes of the largest model whose loss is checked on the CPU, where more would take minutes."""


@dataclass(frozen=True, kw_only=True)
class Resume:
    """A checkpoint to continue from."""

    checkpoint: Loaded
    is_exact: bool
    """True if hardware, plan and versions are those of the checkpoint, so that the rest is bit-identical."""


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run that is ready to be trained."""

    setup: Setup
    """Has the model, which is trained in place."""
    plan: Plan
    sampler: GlobalBatchSampler
    key: Mapping[str, Any]
    """Values that the limit depends on; stored beside every checkpoint."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the run knows beside the plan, and a resume takes over; stored beside every checkpoint."""
    resume: Resume | None = None
    """None for a new run."""


@memory_named("the training was prepared")
def train_plan(
    run: PreparedRun,
    files: RunFiles,
    *,
    progress: Progress,
    ranks: Ranks | None = None,
) -> tuple[Training, nn.Module]:
    """Train a plan to the end of its run.

    Args:
        run: the model, the plan and the batches.
        files: the folder of the run, and its options.
        progress: receives notes and steps.
        ranks: the processes that train together; None if this one trains alone.

    Returns:
        The record of the training, and the trained model.

    Raises:
        InputError: a part of the workload is invalid, or its loss cannot be split into micro-batches.
        AutobatchError: see `autobatch.training.run.train`.
    """
    ranks = ranks or Alone()
    options = files.options
    split_check = options.split_check
    plan, sampler, resume = run.plan, run.sampler, run.resume
    setup = with_knobs(run.setup, plan.knobs)
    told, tell = _kept_notes(progress, [] if resume is None else resume.checkpoint.facts.get("notes", []))
    progress.doing("checking that the loss can be split into micro-batches")
    if plan.parallel == "shard":
        first_batch = None
        _check_shared_split(setup, plan, sampler, ranks, split_check=split_check, tell=tell)
    else:
        first_batch = _check_split(setup, plan, sampler, ranks, split_check=split_check, tell=tell)
    checkpoint = None if resume is None else resume.checkpoint
    seeded_before = None if checkpoint is None else bool(checkpoint.facts.get("sample_seeds"))
    progress.doing("preparing the training")
    with open_loop(
        setup, plan, options, sampler, seeded_before=seeded_before, note=progress.note, ranks=ranks
    ) as loop:
        if resume is not None:
            _restore(loop, resume, sampler, progress)
        facts = {
            "plan": msgspec.to_builtins(plan),
            "key": dict(run.key),
            **run.facts,
            "notes": told,
            "sample_seeds": loop.feed is not None,
            **_facts(setup, sampler, options, ranks),
        }
        progress.doing("training: the first step")
        record = train(loop, replace(files, facts=facts), progress, checkpoint, first_batch)
    return msgspec.structs.replace(record, notes=told), loop.train_state.model


def _kept_notes(progress: Progress, before: list[str]) -> tuple[list[str], Callable[[str], None]]:
    """Return the notes of the run before a resume, and a function that shows a note and adds a new one."""
    kept = list(before)

    def tell(line: str) -> None:
        if line not in kept:
            kept.append(line)
        progress.note(line)

    return kept, tell


def _facts(setup: Setup, sampler: GlobalBatchSampler, options: Options, ranks: Ranks) -> dict[str, Any]:
    """Return what a resume compares: the order of the data, versions, and the devices."""
    return {
        "seed": options.device.seed,
        "warmup_samples": options.train.warmup_samples,
        **data_order_facts(sampler),
        "versions": versions(),
        "ranks": [] if ranks.world == 1 else ranks.gather(device_key(setup)),
    }


def _restore(loop: Loop, resume: Resume, sampler: GlobalBatchSampler, progress: Progress) -> None:
    """Restore the loop, and the place in the stream if the run reads one."""
    checkpoint = resume.checkpoint
    restore_loop(loop, checkpoint.state, same_hardware=resume.is_exact, folder=checkpoint.path)
    if isinstance(sampler, StreamSampler):
        progress.note(sampler.view.load_state_dict(checkpoint.state["stream"]))


def _check_shared_split(
    setup: Setup,
    plan: Plan,
    sampler: GlobalBatchSampler,
    ranks: Ranks,
    *,
    split_check: SplitCheck,
    tell: Callable[[str], None],
) -> None:
    """Check the loss of a model that ranks share, on rank 0 and on the CPU, while the model is whole there.

    Raises:
        InputError: the loss cannot be split into micro-batches.
    """
    if ranks.rank:
        return
    size = sum(parameter.nbytes for parameter in setup.model.parameters())
    is_whole = not any(parameter.is_meta for parameter in setup.model.parameters())
    if not is_whole or size > MOST_CHECKED_BYTES:
        if split_check != "off":
            tell(
                f"the loss was not checked for splitting, because the ranks share a model of "
                f"{format_bytes(size)}: check it once on a smaller one"
            )
        return
    on_host = replace(setup, device=CpuDevice(), precision="fp32", layout=None)
    _check_split(on_host, plan, sampler, ranks, split_check=split_check, tell=tell)


def _check_split(
    setup: Setup,
    plan: Plan,
    sampler: GlobalBatchSampler,
    ranks: Ranks,
    *,
    split_check: SplitCheck,
    tell: Callable[[str], None],
) -> FirstBatch | None:
    """Check the loss before the training, and return what checks the first batch.

    Returns:
        None if nothing does: it was not asked for, or rank 0 does.

    Raises:
        InputError: the loss cannot be split into micro-batches.
    """
    split = split_of(setup, plan, ranks)
    notes, found = check_loss_splits(
        setup,
        micro_batch=split.of_longest(limit_of_rank(ranks, plan)),
        sampler=sampler,
        check=split_check,
        share_of=lambda samples: share_of_rank(ranks, plan, samples),
    )
    for line in notes:
        tell(line)
    if split_check == "off" or ranks.rank:
        return None
    return FirstBatch(setup, check=split_check, note=tell, before=found)
