"""Prediction of what fits on hardware that need not be here, from shapes alone.

The model is built on the meta device if its constructor allows that, so that a model of many billions of
parameters needs no memory. A rank that has a whole model is traced with the buffer in which ranks sum their
gradients; a rank that has a part of it is traced through FSDP2 itself, as rank 0 of a process group that
exchanges nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial

import msgspec

from autobatch.core.errors import DoesNotFitError
from autobatch.core.options import Options
from autobatch.core.records import Estimate, Plan, RankEstimate, Remedy
from autobatch.core.units import format_bytes
from autobatch.device.profiles import HardwareProfile
from autobatch.estimates.copies import run_in_copies
from autobatch.estimates.footprints import Footprint, Unpredictable, footprints
from autobatch.estimates.gpus import Gpus
from autobatch.estimates.suggestions import helpful, in_words, with_changes
from autobatch.estimates.traces import Layout, Traces
from autobatch.footprint.explain import explain
from autobatch.planning import make_plan
from autobatch.report.result import Estimates
from autobatch.workload.contract import WholeBatchLoss, Workload
from autobatch.workload.rng import preserved_random_state, seed_everything
from autobatch.workload.streams import scanned, stream_notes


def estimate_limits(workload: Workload, options: Options) -> Estimates:
    """Predict what fits, on one GPU or on each of many ranks. No GPU is touched.

    Raises:
        InputError: an option, a profile or the workload is invalid, or the model cannot be sharded.
        Unpredictable: the step cannot be traced; the message says why.
        DoesNotFitError: not even a micro-batch of 1 fits on any of the GPUs.
    """
    gpus = Gpus(options)  # refuses wrong options before data are read
    # The model is built without memory, and its code may keep what it builds.
    with preserved_random_state():
        first = scanned(workload, options.batch.target_batch)
        (found,) = run_in_copies([lambda: Estimator(first, options, gpus).estimates()])
        return found


class Estimator:
    """Predictions for a workload."""

    def __init__(self, workload: Workload, options: Options, gpus: Gpus) -> None:
        seed_everything(options.device.seed)
        self._options, self._gpus = options, gpus
        self._traces = Traces(workload, options, gpus)
        self._may_share = gpus.world > 1 and not isinstance(workload.loss, WholeBatchLoss)
        """True if the ranks may share a model."""

    def estimates(self) -> Estimates:
        """Predict for each GPU; for a single one, or if none suffices, also predict what would help."""
        found, gpus = self.limits(), self._gpus
        helped = max(found, key=lambda one: one.budget_bytes)
        if len(found) == 1 or not any(one.fits for one in found):
            at = found.index(helped)
            remedies = self._remedies(gpus.asked[at], helped)
            found[at] = helped = msgspec.structs.replace(helped, remedies=remedies)
        table = self._table() if gpus.world > 1 else []
        if not any(one.fits for one in found):
            raise nothing_fits(found, helped, self._options.search.micro_batch or 1, table)
        notes = [f"{one.profile}: {one.parallel_reason}" for one in found if one.parallel_reason]
        notes += [*gpus.notes(found), *stream_notes(self._traces.workload.train_data), *self._traces.notes()]
        ordered = found if gpus.are_named else sorted(found, key=_need)
        return Estimates(estimates=ordered, over_ranks=table, notes=list(dict.fromkeys(notes)))

    def limits(self) -> list[Estimate]:
        """Predict what fits on each GPU that was asked about."""
        start = time.perf_counter()
        chosen = [self._choose(gpu, self._gpus.world) for gpu in self._gpus.asked]
        predictions = [
            partial(self._limit, gpu, self._footprint(gpu, layout), layout, reason)
            for gpu, (layout, reason) in zip(self._gpus.asked, chosen, strict=True)
        ]
        found = run_in_copies(predictions)
        return [msgspec.structs.replace(one, seconds=time.perf_counter() - start) for one in found]

    def _limit(self, gpu: HardwareProfile, step: Footprint, layout: Layout, reason: str | None) -> Estimate:
        """Predict what fits on one GPU, without what would help."""
        budget, source = self._gpus.budget(gpu)
        spending = self._gpus.spending(gpu)
        found = spending.predict(step, self._options.search.micro_batch)
        where = explain(step.program.at(max(1, found.micro_batch)))
        return Estimate(
            profile=gpu.name,
            budget_bytes=budget,
            budget_source=source,
            precision=self._gpus.precision,
            micro_batch=found.micro_batch,
            micro_batch_low=found.low,
            micro_batch_high=found.high,
            fits=found.fits,
            peak_allocated_bytes=found.outcome.peak_allocated_bytes,
            peak_reserved_bytes=found.outcome.peak_reserved_bytes,
            plan=self._plan(gpu, found.micro_batch, step.multiple) if found.fits else None,
            memory={**where.by_kind, "workspaces of cuBLAS": spending.held_bytes},
            modules=where.by_module,
            phase=where.phase,
            world_size=layout.world,
            parallel=layout.parallel if layout.world > 1 else None,
            parallel_reason=reason,
            seconds=0.0,
        )

    def _choose(self, gpu: HardwareProfile, world: int) -> tuple[Layout, str | None]:
        """Return the layout that was asked for; else replicas if one sample fits, and shards if not."""
        asked = self._options.ranks.parallel
        if world == 1 or asked == "replicate":
            return self._traces.layout("replicate", world), None
        if asked == "shard":
            return self._traces.layout("shard", world), None
        replicas = self._traces.layout("replicate", world)
        if not self._may_share:
            return replicas, "the loss sees the whole batch, so each rank has a whole model"
        step = self._footprint(gpu, replicas)
        if self._gpus.spending(gpu)._replace(cap=step.multiple).largest(step)[0]:
            return replicas, "a whole model fits on each rank, so each has its own (--parallel replicate)"
        return (
            self._traces.layout("shard", world),
            "no whole model fits on a rank, so the ranks share it (--parallel shard)",
        )

    def _remedies(self, gpu: HardwareProfile, one: Estimate) -> list[Remedy]:
        """Return what would let more fit."""
        layout = self._choose(gpu, self._gpus.world)[0]
        step = self._footprint(gpu, layout)
        changes = with_changes(self._traces.step(gpu, layout), step)
        if self._may_share and layout.shards is None:
            shared = self._traces.layout("shard", self._gpus.world)
            changes["shard"] = "--parallel shard", footprints([self._traces.step(gpu, shared)], step.only)[0]
        return helpful(step, changes, self._gpus.spending(gpu))

    def _table(self) -> list[RankEstimate]:
        """Predict for all numbers of ranks that were asked for."""
        cells = []
        for world in self._options.rank_counts:
            for gpu in self._gpus.asked:
                layout, _ = self._choose(gpu, world)
                cells.append(partial(self._cell, gpu, layout, self._footprint(gpu, layout)))
        return run_in_copies(cells)

    def _cell(self, gpu: HardwareProfile, layout: Layout, step: Footprint) -> RankEstimate:
        size, peak = self._gpus.spending(gpu).largest(step)
        return RankEstimate(
            profile=gpu.name,
            world_size=layout.world,
            parallel=layout.parallel,
            budget_bytes=self._gpus.budget(gpu)[0],
            micro_batch=size,
            peak_reserved_bytes=peak,
        )

    def _footprint(self, gpu: HardwareProfile, layout: Layout) -> Footprint:
        try:
            return self._traces.footprint(gpu, layout)
        except Unpredictable as error:
            raise Unpredictable(
                f"{error}. autobatch probe --device sim:{gpu.name} runs the step, on the CPU in a model of "
                "that GPU's allocator"
            ) from error

    def _plan(self, gpu: HardwareProfile, micro_batch: int, multiple: int) -> Plan | None:
        if self._options.batch.target_batch is None:
            return None
        workload = self._traces.workload
        return make_plan(
            target_batch=self._options.batch.target_batch,
            micro_batch_limit=micro_batch,
            world_size=self._gpus.world,
            multiple=multiple,
            learning_rate=workload.learning_rate,
            base_batch=workload.base_batch,
            precision=self._gpus.precision,
            gradient_dtype=self._traces.gradient_dtype,
        )


def _need(one: Estimate) -> tuple[float, int]:
    """Return what to sort by: GPUs that need the fewest micro-batches come first, small ones before large."""
    if not one.fits:
        return math.inf, one.budget_bytes
    return (0 if one.plan is None else one.plan.accumulation_steps), one.budget_bytes


def nothing_fits(
    estimates: Sequence[Estimate], most: Estimate, asked: int, table: Sequence[RankEstimate]
) -> DoesNotFitError:
    """Build the error that a micro-batch fits on no GPU: where its memory goes, and what helps.

    Args:
        estimates: for all GPUs.
        most: for the largest of them.
        asked: the micro-batch.
        table: predictions for more ranks.
    """
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
