"""Prediction of what fits on hardware that need not be here, from shapes alone.

The model is built on the meta device if its constructor allows that, so that a model of many billions of
parameters needs no memory. The step is traced once for each kind of GPU and each way in which ranks share it,
with what may help at the same time. A rank that has a whole model is traced with the buffer in which ranks
sum their gradients; a rank that has a part of it is traced through FSDP2 itself, as rank 0 of a process group
that exchanges nothing. All else, for example the budget, is a replay.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import msgspec

from autobatch.core.errors import DoesNotFitError
from autobatch.core.options import Options
from autobatch.core.records import Estimate, Parallel, Plan, RankEstimate, Remedy
from autobatch.core.units import format_bytes
from autobatch.device.profiles import HardwareProfile
from autobatch.distributed.sharding.layout import ShardLayout, sync_of
from autobatch.estimates.gpus import GpuChoice, precision_on
from autobatch.estimates.traces import ALONE, Layout, Traces
from autobatch.footprint.explain import explain
from autobatch.footprint.fit import Footprint, Unpredictable
from autobatch.footprint.predict import (
    predict,
)
from autobatch.footprint.suggestions import Outcome, in_words
from autobatch.footprint.tracing.apart import run_apart, run_in_copies
from autobatch.planning import make_plan
from autobatch.rehearsal.setup import check_loss_of_ranks
from autobatch.report.result import Estimates
from autobatch.workload.contract import WholeBatchLoss, Workload
from autobatch.workload.rng import preserved_random_state, seed_everything
from autobatch.workload.streams import scanned, stream_notes


def estimate_limits(workload: Workload, options: Options, *, home: Path) -> Estimates:
    """Predict what fits, on one GPU or on each of many ranks. No GPU is touched.

    Raises:
        InputError: an option, a profile or the workload is invalid, or the model cannot be sharded.
        Unpredictable: the step cannot be traced; the message says why.
        DoesNotFitError: not even a micro-batch of 1 fits on any of the GPUs.
    """
    GpuChoice(options, home)  # refuses wrong options before data are read
    # The model is built without memory, and its code may keep what it builds.
    with preserved_random_state():
        first = scanned(workload, options.search.scan, options.batch.target_batch)
        return run_apart(lambda: Estimator(first, options, home).estimates())


class Estimator:
    """Predictions for a workload."""

    def __init__(self, workload: Workload, options: Options, home: Path) -> None:
        seed_everything(options.device.seed)
        self.options = options
        self.gpus = GpuChoice(options, home)
        self.world = self.gpus.world
        self.traces = Traces(workload, options)
        self._may_share = self.world > 1 and not isinstance(workload.loss, WholeBatchLoss)
        """True if the ranks may share a model."""

    def estimates(self) -> Estimates:
        """Predict for each GPU; for one that is named, alone or too small, also predict what would help."""
        gpus, found = self.gpus.load(), []
        is_only = len(gpus) == 1
        if is_only:
            self._prepare(gpus[0])
        for gpu in gpus:
            found.append(self.limit(gpu))
        do_fit = [one.fits for one in found]
        helped = range(len(found)) if self.gpus.names else []
        if not any(do_fit):
            helped = [found.index(_largest(found))]  # which the error is about
        for at in helped:
            if is_only or not do_fit[at]:
                found[at] = msgspec.structs.replace(found[at], remedies=self._remedies(gpus[at], found[at]))
        table: list[RankEstimate] = []
        if self.world > 1:
            shown = [*gpus, *(self.gpus.larger(gpus[0]) if is_only else [])]
            table = self._table(shown, found[0].parallel or "shard")
        if not self.gpus.names:
            found.sort(key=_need)
        if not any(one.fits for one in found):
            raise nothing_fits(found, self.options.search.micro_batch or 1, table)
        return Estimates(estimates=found, over_ranks=table, notes=self.notes(found))

    def notes(self, estimates: Sequence[Estimate]) -> list[str]:
        """Return remarks on predictions and on the traces so far, one per line."""
        notes = [f"{one.profile}: {one.parallel_reason}" for one in estimates if one.parallel_reason]
        notes += self.gpus.notes(estimates)
        notes += stream_notes(self.traces.workload.train_data)
        return list(dict.fromkeys([*notes, *self.traces.notes()]))

    def limit(self, gpu: HardwareProfile) -> Estimate:
        """Predict what fits on one GPU, without what would help."""
        start = time.perf_counter()
        budget, source = self.gpus.budget(gpu)
        layout, reason = self._choose(gpu)
        try:
            step = self._step(gpu, layout)
        except Unpredictable as error:
            raise Unpredictable(
                f"{error}. autobatch probe --device sim:{gpu.name} runs the step, on the CPU in a model of "
                "that GPU's allocator"
            ) from error
        found = predict(
            step,
            budget_bytes=budget,
            cap=self.gpus.cap,
            micro_batch=self.options.search.micro_batch,
            libraries=gpu.libraries,
        )
        where = explain(step, max(1, found.micro_batch))
        return Estimate(
            profile=gpu.name,
            budget_bytes=budget,
            budget_source=source,
            precision=precision_on(gpu.compute_capability, self.options.device.precision),
            micro_batch=found.micro_batch,
            micro_batch_low=found.micro_batch_low,
            micro_batch_high=found.micro_batch_high,
            fits=found.fits,
            peak_allocated_bytes=found.outcome.peak_allocated_bytes,
            peak_reserved_bytes=found.outcome.peak_reserved_bytes,
            plan=self._plan(gpu, found.micro_batch, step.multiple) if found.fits else None,
            memory=where.by_kind,
            modules=where.by_module,
            phase=where.phase,
            world_size=layout.world,
            parallel=layout.parallel if layout.world > 1 else None,
            shard_sync=layout.sync if layout.parallel == "shard" else None,
            parallel_reason=reason,
            seconds=time.perf_counter() - start,
        )

    def layout(self, parallel: Parallel, world: int | None = None) -> Layout:
        """Return the ranks that were asked for, or another number of them."""
        if parallel == "replicate":
            return Layout(world or self.world)
        ranks = self.options.ranks
        asked = ShardLayout(
            world=world or self.world, sync=ranks.shard_sync, modules=ranks.shard_modules
        ).fitting(self.traces.model)
        check_loss_of_ranks(self.traces.workload, asked)
        return Layout(asked.world, parallel, asked.sync, asked.modules)

    def peak(self, gpu: HardwareProfile, layout: Layout, *, cap: int | None = None) -> Outcome:
        """Return the largest micro-batch, 0 if none fits, and its peak; that of 1 if none fits."""
        return self.gpus.spending(gpu, cap).outcome(self._step(gpu, layout))

    def _prepare(self, gpu: HardwareProfile) -> None:
        """Trace at the same time what the answer for one GPU needs, those that take longest first."""
        capability = gpu.compute_capability
        layouts = [self.layout("replicate")]
        if self._may_share:
            layouts.insert(0, self.layout("shard"))
        if self._may_share and self.options.ranks.parallel == "auto":
            self.traces.prepare(capability, layouts)
        layout, _ = self._choose(gpu)
        first = layouts if layout.parallel == "replicate" else [layout]
        others = [self.layout(layout.parallel, world) for world in self._worlds(layout.parallel)[:-1]]
        self.traces.prepare(capability, first, changed=layout, like=others)

    def _choose(self, gpu: HardwareProfile) -> tuple[Layout, str | None]:
        """Return the layout that was asked for; else replicas if one sample fits, and shards if not."""
        asked, replicas = self.options.ranks.parallel, self.layout("replicate")
        if asked == "shard":
            return self.layout("shard"), None
        if asked == "replicate" or self.world == 1:
            return replicas, None
        if not self._may_share:
            return replicas, "the loss sees the whole batch, so each rank has a whole model"
        if self.peak(gpu, replicas, cap=self._step(gpu, replicas).multiple)[0]:
            return replicas, "a whole model fits on each rank, so each has its own (--parallel replicate)"
        return self.layout("shard"), "no whole model fits on a rank, so the ranks share it (--parallel shard)"

    def _remedies(self, gpu: HardwareProfile, one: Estimate) -> list[Remedy]:
        """Return what would let more fit."""
        layout = self.layout(one.parallel or "replicate")
        found = self.traces.suggestions(layout, gpu.compute_capability, self.gpus.spending(gpu))
        others = []
        if layout.parallel == "replicate":
            if self._may_share:
                others.append(("shard", "--parallel shard", self.layout("shard")))
        elif sync_of(self.traces.model, "each") != layout.sync:
            others.append(("shard_sync", "--shard-sync each", layout._replace(sync="each")))
        for name, advice, other in others:
            size, peak = self.peak(gpu, other)
            if size > one.micro_batch:
                found.append(Remedy(name=name, advice=advice, micro_batch=size, peak_bytes=peak))
        return sorted(found, key=lambda remedy: (-remedy.micro_batch, remedy.peak_bytes))

    def _worlds(self, parallel: Parallel) -> list[int]:
        """Return the numbers of ranks for the table: all that were asked for, or some near the only one."""
        asked = self.options.rank_counts[:-1]
        near = (2 * self.world, 4 * self.world, self.world // 2) if parallel == "shard" else ()
        return [*(asked or (n for n in near if n > 1)), self.world]

    def _table(self, gpus: Sequence[HardwareProfile], parallel: Parallel) -> list[RankEstimate]:
        """Predict for other numbers of ranks too."""

        def cells(world: int) -> list[RankEstimate]:
            layout = self.layout(parallel, world) if world > 1 else ALONE
            peaks = [(gpu, *self.peak(gpu, layout)) for gpu in gpus]
            return [
                RankEstimate(
                    profile=gpu.name,
                    world_size=world,
                    parallel=layout.parallel,
                    budget_bytes=self.gpus.budget(gpu)[0],
                    micro_batch=size,
                    peak_reserved_bytes=peak,
                )
                for gpu, size, peak in peaks
            ]

        found = run_in_copies([partial(cells, world) for world in self._worlds(parallel)])
        return sorted(chain.from_iterable(found), key=lambda one: one.world_size)

    def _step(self, gpu: HardwareProfile, layout: Layout) -> Footprint:
        like = None if layout.world == self.world else layout._replace(world=self.world)
        return self.traces.step(layout, gpu.compute_capability, like=like)

    def _plan(self, gpu: HardwareProfile, micro_batch: int, multiple: int) -> Plan | None:
        if self.options.batch.target_batch is None:
            return None
        return make_plan(
            target_batch=self.options.batch.target_batch,
            micro_batch_limit=micro_batch,
            world_size=self.world,
            multiple=multiple,
            learning_rate=self.traces.workload.learning_rate,
            base_batch=self.traces.workload.base_batch,
            precision=precision_on(gpu.compute_capability, self.options.device.precision),
            gradient_dtype=self.traces.gradient_dtype,
        )


def _need(one: Estimate) -> tuple[float, int]:
    """Return what to sort by: GPUs that need the fewest micro-batches come first, small ones before large."""
    if not one.fits:
        return math.inf, one.budget_bytes
    return (0 if one.plan is None else one.plan.accumulation_steps), one.budget_bytes


def _largest(estimates: Sequence[Estimate]) -> Estimate:
    return max(estimates, key=lambda one: one.budget_bytes)


def nothing_fits(estimates: Sequence[Estimate], asked: int, table: Sequence[RankEstimate]) -> DoesNotFitError:
    """Build the error that a micro-batch fits on no GPU: where its memory goes, and what helps."""
    most = _largest(estimates)
    where = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in list(most.memory.items())[:3])
    names = ", ".join(one.profile for one in estimates)
    where_not = f"not to fit on {names}" if len(estimates) == 1 else f"to fit on none of {names}"
    text = (
        f"a micro-batch of {asked} is predicted {where_not}: it takes "
        f"{format_bytes(most.peak_reserved_bytes)} ({where}), and {most.profile} has a budget of "
        f"{format_bytes(most.budget_bytes)}. What helps: a larger GPU{in_words(most.remedies)}"
    )
    fitting = [one for one in table if one.micro_batch]
    if fitting:
        best = min(fitting, key=lambda one: (one.world_size, one.budget_bytes))
        text += (
            f", {best.world_size} ranks on {best.profile} (a micro-batch of {best.micro_batch:,} fits there)"
        )
    return DoesNotFitError(text)
