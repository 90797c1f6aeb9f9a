"""A stored run that continues: with its own plan, or with another one if something has changed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from autobatch.api.call import Call
from autobatch.api.ranks import check_data_of_ranks, claim_of_ranks
from autobatch.api.stages import OPENING, layout_of_call
from autobatch.api.training_setup import budgeted, open_to_train, sampler_of
from autobatch.core.progress import Progress
from autobatch.core.records import Plan, RunRecord
from autobatch.distributed.rank_plan import layout_of
from autobatch.distributed.sharding.layout import ShardLayout
from autobatch.report.result import Result
from autobatch.setup.setup import KeyValue, Setup, data_of_setup
from autobatch.training.checkpoint import Loaded
from autobatch.training.resume import (
    changes_since_checkpoint,
    check_same_data_order,
    load_plan,
    load_run_state,
)
from autobatch.training.run import PreparedRun
from autobatch.training.run_folder import folder_of
from autobatch.workload.data_digest import DataDigest
from autobatch.workload.order import GlobalBatchSampler
from autobatch.workload.reference import find_workload

BEFORE_TRAINING = ("device", "probe", "tuning", "title", "predicted", "memory_curve")
"""Records of the parts before the training, which every checkpoint keeps for a resume."""


def keep_records(result: Result, data: DataDigest | None) -> dict[str, Any]:
    """Return what a resume takes over: the records of the parts before the training, and the data."""
    return {"records": result.to_json(*BEFORE_TRAINING, "profile"), "data": msgspec.to_builtins(data)}


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """A run to resume, with the setup that it continues in."""

    checkpoint: Loaded
    plan: Plan
    setup: Setup
    sampler: GlobalBatchSampler
    data: DataDigest | None
    out: Path
    changes: list[str]
    """What rules out the stored plan, in the user's words; empty if the run continues with it."""

    def with_own_plan(self, progress: Progress) -> tuple[Result, PreparedRun]:
        """Continue with the stored plan, on the same hardware."""
        # Nothing is claimed of a stream, and of values that are random by nature.
        exactly = ", bit for bit" if self.data is not None and self.data.is_fixed else ""
        progress.note(f"resuming from {self.checkpoint.path} on the same hardware{exactly}")
        device = self.setup.device.describe()
        progress.opened(device)
        progress.planned(self.plan)
        result = Result(device=device, plan=self.plan, title=self.setup.workload.name)
        result = self._with_stored_records(result)
        return result, self._prepared(result, self.checkpoint.facts.get("key", {}), is_exact=True)

    def with_new_plan(self, result: Result, key: Mapping[str, KeyValue]) -> tuple[Result, PreparedRun]:
        """Continue with another plan, at the learning rate of the stored one."""
        names = [name for name in Plan.__struct_fields__ if name.startswith("learning_rate")]
        rate = {name: getattr(self.plan, name) for name in names}
        assert result.plan is not None
        plan = msgspec.structs.replace(result.plan, **rate)
        tuning = self._with_stored_records(result).tuning
        if tuning is not None and tuning.trials:
            note = "the run went on with another plan, without the choices that were made before"
            tuning = msgspec.structs.replace(tuning, notes=[*tuning.notes, note])
        result = msgspec.structs.replace(result, plan=plan, tuning=tuning)
        return result, self._prepared(result, key, is_exact=False)

    def as_call(self, call: Call) -> Call:
        """Return the call that plans again: in the layout of the open setup, and not tuned."""
        call.progress.note(
            f"resuming from {self.checkpoint.path} with another {' and another '.join(self.changes)}: the "
            "batch, the learning rate and the order of the data stay, the micro-batch is planned again, and "
            "sums differ by rounding"
        )
        call = call.with_options(trials=0, tune_lr=False)
        layout = self.setup.layout
        if call.ranks.world == 1:
            return call
        if layout is None:
            return call.with_options(parallel="replicate")
        return call.with_options(parallel="shard", shard_sync=layout.sync, shard_modules=layout.modules)

    def _prepared(self, result: Result, key: Mapping[str, KeyValue], *, is_exact: bool) -> PreparedRun:
        assert result.plan is not None
        return PreparedRun(
            setup=budgeted(self.setup, key),
            plan=result.plan,
            sampler=self.sampler,
            key=key,
            facts=keep_records(result, self.data),
            resumed=self.checkpoint,
            is_exact=is_exact,
        )

    def _with_stored_records(self, result: Result) -> Result:
        """Return a result with the records that an earlier process of the run has stored, if it has any."""
        stored = self.checkpoint.facts.get("records", {})
        given = {name: stored[name] for name in BEFORE_TRAINING if stored.get(name) is not None}
        if "device" not in given:
            return result
        found = msgspec.convert(given, RunRecord)
        profile = stored.get("profile")
        return msgspec.structs.replace(
            result,
            profile=None if profile is None else Path(profile),
            **{name: getattr(found, name) for name in BEFORE_TRAINING},
        )


def open_stored(call: Call, lock: ExitStack) -> StoredRun:
    """Open the run to resume, and compare it with what is asked for now.

    Args:
        call: of this rank.
        lock: keeps the folder of the run locked.

    Raises:
        InputError: there is none, or it cannot continue with these options or data.
    """
    options, ranks = call.options, call.ranks
    call.progress.doing(OPENING)
    workload = find_workload(call.workload, options.device.seed)
    out = claim_of_ranks(call, lambda: folder_of(options.train.out, workload.name, resume=True), lock)
    checkpoint = load_run_state(out, ranks)
    for line in checkpoint.passed_over:
        call.progress.note(f"skipped an invalid checkpoint: {line}")
    plan = load_plan(checkpoint, options)
    setup = open_to_train(call, workload, layout_to_resume(call, plan))
    sampler = sampler_of(call, setup, None)
    check_same_data_order(checkpoint, sampler, scheduled=setup.workload.schedule is not None)
    data = data_of_setup(setup)
    check_data_of_ranks(data, ranks, checkpoint)
    changes = changes_since_checkpoint(checkpoint, setup, sampler, ranks, options)
    return StoredRun(
        checkpoint=checkpoint,
        plan=plan,
        setup=setup,
        sampler=sampler,
        data=data,
        out=out,
        changes=sorted({change for of_rank in ranks.gather(changes) for change in of_rank}),
    )


def layout_to_resume(call: Call, plan: Plan) -> ShardLayout | None:
    """Return the layout of the shared model of a resumed run: as asked, else as before."""
    if call.ranks.world == 1 or call.options.ranks.parallel == "replicate":
        return None
    if call.options.ranks.parallel == "shard":
        return layout_of_call(call)
    before = layout_of(plan)
    return None if before is None else msgspec.structs.replace(before, world=call.ranks.world)
