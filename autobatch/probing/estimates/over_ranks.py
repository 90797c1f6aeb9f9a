"""Prediction of what fits on one rank of many, for ranks and GPUs that need not be here.

A rank that has a whole model is traced with the buckets of DDP. A rank that has a part of it is traced
through FSDP2 itself, as rank 0 of a process group that exchanges nothing. A deep model is traced by a few of
its layers. All of this happens in copies of the process.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import msgspec

from autobatch.core.errors import DoesNotFitError
from autobatch.core.records.base import Parallel
from autobatch.core.records.estimate import Estimate, RankEstimate, Remedy
from autobatch.core.records.plan import Plan
from autobatch.core.units import GiB, format_bytes
from autobatch.device.allocator.trace import replay
from autobatch.device.budget import GPU_HEADROOM_SHARE, resolve_budget
from autobatch.device.hardware_profile import HardwareProfile
from autobatch.device.simulated import context_bytes
from autobatch.distributed.sharding.checks import sync_of
from autobatch.distributed.sharding.layout import ShardLayout
from autobatch.footprint.predict import Footprint, Prediction, gpu_allocator, largest_on, predict, program_on
from autobatch.footprint.remedies import find_remedies
from autobatch.footprint.tracing.apart import run_apart, run_in_copies
from autobatch.planning import make_plan
from autobatch.probing.estimates.answer import estimate_from, fewest_ranks, nothing_fits
from autobatch.probing.estimates.layouts import Layout
from autobatch.probing.estimates.settings import (
    EstimateSettings,
    RankSettings,
    cap_notes,
    cap_of,
    device_notes,
    larger_gpus,
    named_gpus,
    precision_on,
    spending_on,
)
from autobatch.probing.estimates.traces import Traces
from autobatch.report.result import Estimates
from autobatch.setup.setup import check_loss_of_ranks
from autobatch.workload.contract import WholeBatchLoss, Workload
from autobatch.workload.rng import preserved_random_state, seed_everything
from autobatch.workload.streams import scanned, stream_notes

NCCL_BYTES = 1 * GiB
"""Memory of NCCL on a GPU, outside of the allocator. Users measure from a few hundred MiB to 1.6 GB, by
channels, links and GPU (github.com/NVIDIA/nccl/issues/864 and 1685)."""
TABLE_SECONDS = 15.0
"""Time after which no further number of ranks is traced for the table."""


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
    if ranks.parallel == "shard":
        asked = ShardLayout(world=ranks.ranks, sync=ranks.shard_sync, modules=ranks.shard_modules)
        check_loss_of_ranks(workload, asked)

    def predicted() -> Estimates:
        return RankEstimator(scanned(workload, settings.scan), settings, ranks).estimates(home)

    with preserved_random_state():
        return run_apart(predicted)


class RankEstimator:
    """Predictions for a rank of many, from traces of a workload.

    Args:
        workload: what to train.
        settings: what to predict.
        ranks: the ranks.
    """

    def __init__(self, workload: Workload, settings: EstimateSettings, ranks: RankSettings) -> None:
        seed_everything(settings.seed)
        self.settings = settings
        self.ranks = ranks
        self.traces = Traces(workload, settings)
        self._sees_batch = isinstance(workload.loss, WholeBatchLoss)

    def estimates(self, home: Path) -> Estimates:
        """Predict for each GPU, and for one GPU also what would help."""
        gpus = named_gpus(self.settings, home)
        if len(gpus) == 1:
            self._prepare(gpus[0])
        found = [self.limit(gpu) for gpu in gpus]
        if len(gpus) == 1:
            found = [msgspec.structs.replace(found[0], remedies=self._remedies(gpus[0], found[0]))]
        shown = gpus if len(gpus) > 1 else [gpus[0], *larger_gpus(gpus[0], home)]
        table = self._table(shown, found[0].parallel or "shard")
        if not any(one.fits for one in found):
            raise DoesNotFitError(nothing_fits(found, self.settings) + fewest_ranks(table))
        reasons = [f"{one.profile}: {one.parallel_reason}" for one in found if one.parallel_reason]
        notes = [*reasons, *cap_notes(found, self.settings), *self.notes()]
        return Estimates(estimates=found, over_ranks=table, notes=list(dict.fromkeys(notes)))

    def notes(self) -> list[str]:
        """Return remarks on the traces so far and on the budgets, one per line."""
        notes = [*device_notes(self.settings), *stream_notes(self.traces.workload.train_data)]
        notes += self.traces.notes()
        if self.settings.memory_budget is None:
            notes.append(
                f"each budget leaves {format_bytes(NCCL_BYTES)} for the buffers of NCCL, not measured here"
            )
        return notes

    def limit(self, gpu: HardwareProfile) -> Estimate:
        """Predict what fits on one GPU, without what would help."""
        start = time.perf_counter()
        budget = self._budget(gpu)
        layout, reason = self._choose(gpu)
        step = self._step(gpu, layout)
        found = predict(
            step,
            budget_bytes=budget[0],
            cap=cap_of(self.settings),
            micro_batch=self.settings.micro_batch,
            libraries=gpu.libraries,
        )
        made = estimate_from(step, found, gpu, budget, precision_on(self.settings, gpu.compute_capability))
        return msgspec.structs.replace(
            made,
            plan=self._plan(gpu, found, step.multiple),
            seconds=time.perf_counter() - start,
            world_size=layout.world,
            parallel=layout.parallel,
            shard_sync=layout.sync if layout.parallel == "shard" else None,
            parallel_reason=reason,
        )

    def layout(self, parallel: Parallel, world: int | None = None) -> Layout:
        """Return the ranks that were asked for, or another number of them."""
        sync = sync_of(self.traces.model, self.ranks.shard_sync)
        return Layout(world or self.ranks.ranks, parallel, sync, self.ranks.shard_modules)

    def peak(self, gpu: HardwareProfile, layout: Layout) -> tuple[int, int]:
        """Return the largest micro-batch, 0 if none fits, and its peak; that of 1 if none fits."""
        budget, _ = self._budget(gpu)
        step = self._step(gpu, layout)
        program = program_on(step, gpu.libraries)
        cap = cap_of(self.settings)
        size = largest_on(step, program, lambda: gpu_allocator(budget), cap)
        found = replay(program.at(max(1, size)), gpu_allocator(budget if size else None))
        return size, found.peak_reserved_bytes or found.peak_allocated_bytes

    def _prepare(self, gpu: HardwareProfile) -> None:
        """Trace at the same time what the answer for one GPU needs, those that take longest first."""
        capability = gpu.compute_capability
        # A shared model takes longer.
        both = [self.layout("shard")] * (not self._sees_batch) + [self.layout("replicate")]
        if self.ranks.parallel == "auto":
            self.traces.prepare(capability, both)
        layout, _ = self._choose(gpu)
        first = both if layout.parallel == "replicate" else [layout]
        others = [self.layout(layout.parallel, world) for world in self._worlds(layout.parallel)[:-1]]
        self.traces.prepare(capability, first, changed=layout, like=others)

    def _choose(self, gpu: HardwareProfile) -> tuple[Layout, str | None]:
        """Return the layout that was asked for; else replicas if one sample fits, and shards if not."""
        if self.ranks.parallel != "auto":
            return self.layout(self.ranks.parallel), None
        replicas = self.layout("replicate")
        if self._sees_batch:
            return replicas, "the loss sees the whole batch, so each rank has a whole model"
        step = self._step(gpu, replicas)
        program = program_on(step, gpu.libraries)
        budget, _ = self._budget(gpu)
        if largest_on(step, program, lambda: gpu_allocator(budget), step.multiple):
            return replicas, "a whole model fits on each rank, so each has its own (--parallel replicate)"
        return self.layout("shard"), "no whole model fits on a rank, so the ranks share it (--parallel shard)"

    def _remedies(self, gpu: HardwareProfile, one: Estimate) -> list[Remedy]:
        layout = self.layout(one.parallel or "shard")
        capability = gpu.compute_capability
        spending = spending_on(gpu, one.budget_bytes, cap_of(self.settings))
        step = self._step(gpu, layout)
        with self.traces.arranged(layout) as how:
            setting, trace = self.traces.setting(capability, how), self.traces.tracer(layout, capability)
            found = find_remedies(setting, step, spending, trace=trace)
        others = []
        if layout.parallel == "replicate":
            others += [("shard", "--parallel shard", self.layout("shard"))] * (not self._sees_batch)
        elif sync_of(self.traces.model, "each") != layout.sync:
            others.append(("shard_sync", "--shard-sync each", layout._replace(sync="each")))
        for name, advice, other in others:
            size, peak = self.peak(gpu, other)
            if size > one.micro_batch:
                found.append(Remedy(name=name, advice=advice, micro_batch=size, peak_bytes=peak))
        return sorted(found, key=lambda remedy: (-remedy.micro_batch, remedy.peak_bytes))

    def _worlds(self, parallel: Parallel) -> list[int]:
        """Return the numbers of ranks for the table, the one that was asked for last."""
        asked = self.ranks.ranks
        return [*(n for n in (2 * asked, 4 * asked, asked // 2) if n > 1 and parallel == "shard"), asked]

    def _table(self, gpus: Sequence[HardwareProfile], parallel: Parallel) -> list[RankEstimate]:
        """Predict for other numbers of ranks too, until the time is over; shared models only."""
        start = time.perf_counter()

        def rows(world: int) -> list[RankEstimate]:
            if world != self.ranks.ranks and time.perf_counter() - start > TABLE_SECONDS:
                return []
            return [self._row(gpu, self.layout(parallel, world)) for gpu in gpus]

        found = run_in_copies([partial(rows, world) for world in self._worlds(parallel)])
        return sorted(chain.from_iterable(found), key=lambda row: row.world_size)

    def _row(self, gpu: HardwareProfile, layout: Layout) -> RankEstimate:
        size, peak = self.peak(gpu, layout)
        return RankEstimate(
            profile=gpu.name,
            world_size=layout.world,
            parallel=layout.parallel,
            budget_bytes=self._budget(gpu)[0],
            micro_batch=size,
            peak_reserved_bytes=peak,
        )

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

    def _step(self, gpu: HardwareProfile, layout: Layout) -> Footprint:
        like = None if layout.world == self.ranks.ranks else layout._replace(world=self.ranks.ranks)
        return self.traces.step(layout, gpu.compute_capability, like=like)

    def _plan(self, gpu: HardwareProfile, found: Prediction, multiple: int) -> Plan | None:
        if self.settings.target_batch is None or not found.fits:
            return None
        return make_plan(
            target_batch=self.settings.target_batch,
            micro_batch_limit=found.micro_batch,
            world_size=self.ranks.ranks,
            multiple=multiple,
            learning_rate=self.traces.workload.learning_rate,
            base_batch=self.traces.workload.base_batch,
            precision=precision_on(self.settings, gpu.compute_capability),
            gradient_dtype=self.traces.gradient_dtype,
        )
