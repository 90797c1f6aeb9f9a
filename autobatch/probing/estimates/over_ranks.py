"""Prediction of what fits on one rank of many, for ranks and GPUs that need not be here.

A rank that has a whole model is traced with the buckets of DDP. A rank that has a part of it is traced
through FSDP2 itself, as rank 0 of a process group that exchanges nothing. A deep model is traced by a few of
its layers. All of this happens in a copy of the process.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import torch
from torch import nn

from autobatch.core.errors import DoesNotFitError, InputError
from autobatch.core.records.base import Parallel, ShardSync
from autobatch.core.records.estimate import Estimate, RankEstimate, Remedy
from autobatch.core.records.plan import Plan
from autobatch.core.units import GiB, format_bytes
from autobatch.device.allocator.caching import CachingAllocator
from autobatch.device.budget import GPU_HEADROOM_SHARE, resolve_budget
from autobatch.device.hardware_profile import HardwareProfile
from autobatch.device.profiles import list_profiles
from autobatch.device.simulated import context_bytes
from autobatch.distributed.sharding.checks import sync_of
from autobatch.footprint.depth import DeepFootprint, deep_footprint
from autobatch.footprint.largest import largest
from autobatch.footprint.predict import Footprint, Prediction, predict, with_workspaces
from autobatch.footprint.remedies import NATIVE_BF16, find_remedies
from autobatch.footprint.tracing.apart import run_apart
from autobatch.footprint.tracing.trace_step import Arrange, Setting
from autobatch.planning import make_plan
from autobatch.probing.estimates.estimate import (
    EstimateSettings,
    cap_of,
    device_notes,
    estimate_from,
    named_gpus,
    nothing_fits,
    precision_on,
    spending_on,
)
from autobatch.probing.setup_model import build_model
from autobatch.report.result import Estimates
from autobatch.step.gradients import gradient_dtype_of
from autobatch.workload.contract import WholeBatchLoss, Workload
from autobatch.workload.data import WorstCaseSampler
from autobatch.workload.rng import preserved_random_state, seed_everything
from autobatch.workload.streams import scanned, stream_notes

NCCL_BYTES = 1 * GiB
"""Memory of NCCL on a GPU, outside of the allocator. Users measure from a few hundred MiB to 1.6 GB, by
channels, links and GPU (github.com/NVIDIA/nccl/issues/864 and 1685)."""
TABLE_SECONDS = 15.0
"""Time after which no further number of ranks is traced for the table."""
TABLE_GPUS = 3
"""GPUs in the table, if only one was asked about."""


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """The ranks of an estimate: plain values."""

    ranks: int
    parallel: Literal["auto", "replicate", "shard"] = "auto"
    shard_sync: ShardSync = "each"
    shard_modules: str | None = None


class Layout(NamedTuple):
    """The ranks of a step, and what each of them holds."""

    world: int
    parallel: Parallel
    sync: ShardSync
    modules: str | None


def estimate_over_ranks(
    workload: Workload, settings: EstimateSettings, ranks: RankSettings, *, home: Path
) -> Estimates:
    """Predict what fits on one rank of many. No GPU is touched.

    Args:
        workload: what to train.
        settings: what to predict.
        ranks: the ranks.
        home: data directory, with saved profiles.

    Raises:
        InputError: a setting, a profile or the workload is invalid, or the model cannot be sharded.
        Unpredictable: the step cannot be traced; the message says why.
        DoesNotFitError: not even a micro-batch of 1 fits on any of the GPUs.
    """
    if isinstance(workload.loss, WholeBatchLoss):
        raise InputError(
            f"a WholeBatchLoss sees all samples of a batch, and each of {ranks.ranks} ranks has a part of "
            "them: estimate it for one GPU, without --ranks"
        )

    def predicted() -> Estimates:
        return _Estimator(scanned(workload, settings.scan), settings, ranks).estimates(home)

    with preserved_random_state():
        return run_apart(predicted)


@dataclass
class _Estimator:
    """Traces of a workload as one rank of many, and the predictions from them."""

    workload: Workload
    settings: EstimateSettings
    ranks: RankSettings
    _steps: dict[tuple[Layout, bool], DeepFootprint] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seed_everything(self.settings.seed)
        self.model, self._notes = _built(self.workload)
        self.gradient_dtype = gradient_dtype_of(self.model, self.settings.gradient_dtype)
        self.worst_case = WorstCaseSampler(self.workload)
        self.worst_case.check_collate()

    def estimates(self, home: Path) -> Estimates:
        """Predict for each GPU, and for one GPU also what would help."""
        gpus = named_gpus(self.settings, home)
        found = [self.limit(gpu) for gpu in gpus]
        if len(gpus) == 1:
            found = [msgspec.structs.replace(found[0], remedies=self._remedies(gpus[0], found[0]))]
        shown = gpus if len(gpus) > 1 else [gpus[0], *_larger(gpus[0], home)]
        table = self._table(shown, found)
        if not any(one.fits for one in found):
            raise DoesNotFitError(nothing_fits(found, self.settings) + _best_in_words(table))
        reasons = [f"{one.profile}: {one.parallel_reason}" for one in found if one.parallel_reason]
        notes = dict.fromkeys([*reasons, *self.notes()])
        return Estimates(estimates=found, over_ranks=table, notes=list(notes))

    def notes(self) -> list[str]:
        """Return remarks on the traces so far and on the budgets, one per line."""
        return [
            *device_notes(self.settings),
            *stream_notes(self.workload.train_data),
            *self.worst_case.notes,
            *self._notes,
            *(note for one in self._steps.values() for note in one.step.notes),
            *self._nccl_notes(),
        ]

    def _nccl_notes(self) -> list[str]:
        if self.settings.memory_budget is not None:
            return []
        return [f"each budget leaves {format_bytes(NCCL_BYTES)} for NCCL, a figure of others for its buffers"]

    def _layout(self, parallel: Parallel, world: int | None = None) -> Layout:
        sync = sync_of(self.model, self.ranks.shard_sync)
        return Layout(world or self.ranks.ranks, parallel, sync, self.ranks.shard_modules)

    def _choose(self, gpu: HardwareProfile) -> tuple[Layout, str | None]:
        """Return the layout that was asked for; else replicas if one sample fits, and shards if not."""
        if self.ranks.parallel != "auto":
            return self._layout(self.ranks.parallel), None
        replicas = self._layout("replicate")
        if self._largest(gpu, replicas, cap=1):
            return replicas, "a whole model fits on each rank, so each has its own (--parallel replicate)"
        return self._layout(
            "shard"
        ), "no whole model fits on a rank, so the ranks share it (--parallel shard)"

    def limit(self, gpu: HardwareProfile) -> Estimate:
        """Predict what fits on one GPU, without what would help."""
        start = time.perf_counter()
        budget, source = self._budget(gpu)
        layout, reason = self._choose(gpu)
        step = self._trace(gpu, layout)
        found = predict(
            step,
            budget_bytes=budget,
            cap=cap_of(self.workload, self.settings),
            micro_batch=self.settings.micro_batch,
            workspaces=gpu.workspaces,
        )
        precision = precision_on(self.settings, gpu.compute_capability)
        made = estimate_from(step, found, gpu, (budget, source), precision)
        return msgspec.structs.replace(
            made,
            plan=self._plan(gpu, found),
            seconds=time.perf_counter() - start,
            world_size=layout.world,
            parallel=layout.parallel,
            shard_sync=layout.sync if layout.parallel == "shard" else None,
            parallel_reason=reason,
        )

    def _remedies(self, gpu: HardwareProfile, one: Estimate) -> list[Remedy]:
        layout = self._layout(one.parallel or "shard")
        spending = spending_on(gpu, one.budget_bytes, cap_of(self.workload, self.settings))
        with _arranged(layout, self.model) as arranged:
            setting = self._setting(gpu, arranged)
            found = find_remedies(setting, self._trace(gpu, layout), spending, trace=_traced)
        others = []
        if layout.parallel == "replicate":
            others.append(("shard", "--parallel shard", self._layout("shard")))
        elif sync_of(self.model, "each") != layout.sync:
            others.append(("shard_sync", "--shard-sync each", layout._replace(sync="each")))
        for name, advice, other in others:
            size, peak = self._peak(gpu, other)
            if size > one.micro_batch:
                found.append(Remedy(name=name, advice=advice, micro_batch=size, peak_bytes=peak))
        return sorted(found, key=lambda remedy: (-remedy.micro_batch, remedy.peak_bytes))

    def _table(self, gpus: Sequence[HardwareProfile], found: Sequence[Estimate]) -> list[RankEstimate]:
        """Predict for other numbers of ranks too, until the time is over; shared models only."""
        parallel = found[0].parallel or "shard"
        asked = self.ranks.ranks
        worlds = [asked, 2 * asked, 4 * asked, asked // 2] if parallel == "shard" else [asked]
        start = time.perf_counter()
        rows: list[RankEstimate] = []
        for world in worlds:
            if world < 2 or (world != asked and time.perf_counter() - start > TABLE_SECONDS):
                continue
            layout = self._layout(parallel, world)
            rows += [self._row(gpu, layout) for gpu in gpus]
        return sorted(rows, key=lambda row: row.world_size)

    def _row(self, gpu: HardwareProfile, layout: Layout) -> RankEstimate:
        size, peak = self._peak(gpu, layout)
        return RankEstimate(
            profile=gpu.name,
            world_size=layout.world,
            parallel=layout.parallel,
            budget_bytes=self._budget(gpu)[0],
            micro_batch=size,
            peak_reserved_bytes=peak,
        )

    def _largest(self, gpu: HardwareProfile, layout: Layout, *, cap: int) -> int:
        budget, _ = self._budget(gpu)
        program = with_workspaces(self._trace(gpu, layout), gpu.workspaces)
        return largest(program, lambda: CachingAllocator(budget), cap, neighbours=0) or 0

    def _peak(self, gpu: HardwareProfile, layout: Layout) -> tuple[int, int]:
        """Return the largest micro-batch, 0 if none fits, and its peak; that of 1 if none fits."""
        size = self._largest(gpu, layout, cap=cap_of(self.workload, self.settings))
        found = predict(
            self._trace(gpu, layout),
            budget_bytes=self._budget(gpu)[0],
            cap=1,
            micro_batch=max(1, size),
            workspaces=gpu.workspaces,
        )
        return size, found.peak_reserved_bytes or found.peak_allocated_bytes

    def _budget(self, gpu: HardwareProfile) -> tuple[int, str]:
        return resolve_budget(
            self.settings.memory_budget,
            total_bytes=gpu.total_bytes,
            available=[
                (gpu.total_bytes, "in total"),
                (-context_bytes(gpu), "CUDA context"),
                *([(-NCCL_BYTES, "NCCL")] if self.ranks.ranks > 1 else []),
            ],
            headroom_share=GPU_HEADROOM_SHARE,
            owner=gpu.title,
        )

    def _trace(self, gpu: HardwareProfile, layout: Layout) -> Footprint:
        is_new = gpu.compute_capability >= NATIVE_BF16
        key = layout, is_new
        if key not in self._steps:
            like = self._steps.get((layout._replace(world=self.ranks.ranks), is_new))
            with _arranged(layout, self.model) as arranged:
                setting = self._setting(gpu, arranged)
                self._steps[key] = (
                    deep_footprint(setting, tested=bool(self._steps)) if like is None else like.on(setting)
                )
        return self._steps[key].step

    def _setting(self, gpu: HardwareProfile, arranged: tuple[Arrange | None, int]) -> Setting:
        arrange, world = arranged
        return Setting(
            workload=self.workload,
            model=self.model,
            batch_of=self.worst_case.batch,
            precision=precision_on(self.settings, gpu.compute_capability),
            capability=gpu.compute_capability,
            arrange=arrange,
            world=world,
            gradient_dtype=self.gradient_dtype,
        )

    def _plan(self, gpu: HardwareProfile, found: Prediction) -> Plan | None:
        if self.settings.target_batch is None or not found.fits:
            return None
        return make_plan(
            target_batch=self.settings.target_batch,
            micro_batch_limit=found.micro_batch,
            world_size=self.ranks.ranks,
            learning_rate=self.workload.learning_rate,
            base_batch=self.workload.base_batch,
            precision=precision_on(self.settings, gpu.compute_capability),
            gradient_dtype=self.gradient_dtype,
        )


@contextmanager
def _arranged(layout: Layout, model: nn.Module) -> Iterator[tuple[Arrange | None, int]]:
    """Return how the ranks arrange a model, and how many sum gradients in a buffer beside it."""
    # Importing FSDP takes a second, which an estimate for one GPU saves.
    from autobatch.distributed.fake_group import fake_ranks
    from autobatch.distributed.replicas import has_buckets, in_buckets
    from autobatch.distributed.sharding.model import Sharding

    if layout.world == 1:
        yield None, 1
        return
    if layout.parallel == "replicate":
        yield (in_buckets, 1) if has_buckets(model) else (None, layout.world)
        return
    with fake_ranks(layout.world) as mesh:
        yield Sharding(mesh=mesh, sync=layout.sync, modules=layout.modules), 1


def _traced(name: str, setting: Setting) -> Footprint:
    """Trace a step with a change."""
    del name
    return deep_footprint(setting).step


def _built(workload: Workload) -> tuple[nn.Module, list[str]]:
    """Build the model on the meta device, or on the CPU with a note if its constructor needs values."""
    try:
        with torch.device("meta"):
            return build_model(workload), []
    except InputError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
    model = build_model(workload)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return model, [
        f"the model cannot be built on the meta device ({reason}), so it was built on the CPU, where its "
        f"parameters take {format_bytes(size)}"
    ]


def _larger(gpu: HardwareProfile, home: Path) -> list[HardwareProfile]:
    """Return the next GPUs with more memory and at least the same operators."""
    others = [
        other
        for other in list_profiles(user_dir=home).profiles
        if other.total_bytes > gpu.total_bytes
        and (other.compute_capability >= (8, 0)) >= (gpu.compute_capability >= (8, 0))
    ]
    by_memory = {
        other.total_bytes // GiB: other for other in sorted(others, key=lambda o: o.name, reverse=True)
    }
    return [by_memory[size] for size in sorted(by_memory)][: TABLE_GPUS - 1]


def _best_in_words(table: Sequence[RankEstimate]) -> str:
    """Write the fewest ranks on which a sample fits as the end of a sentence."""
    fitting = [row for row in table if row.micro_batch]
    if not fitting:
        return ""
    best = min(fitting, key=lambda row: (row.world_size, row.budget_bytes))
    return f", {best.world_size} ranks on {best.profile} (a micro-batch of {best.micro_batch:,} fits there)"
