"""Prediction of what fits on hardware that need not be here, from shapes alone.

The model is built on the meta device if its constructor allows that, so that a model of many billions of
parameters needs no memory. A rank that has a whole model is traced with the buffer in which ranks sum their
gradients; a rank that has a part of it is traced through FSDP2 itself, as rank 0 of a process group that
exchanges nothing. Allocations differ between GPUs that run other kernels, between ways to share a step among
ranks, and with each change that may help. Everything else, for example the budget, is a replay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from msgspec.structs import replace
from torch import nn

from autobatch.core.errors import DoesNotFitError, InputError
from autobatch.core.options import Options
from autobatch.core.records import Estimate, Parallel, Plan, Remedy
from autobatch.core.units import format_bytes
from autobatch.device.oom import memory_named
from autobatch.device.profiles import HardwareProfile
from autobatch.estimates.copies import run_in_copies
from autobatch.estimates.footprints import Footprint, Unpredictable, footprint
from autobatch.estimates.gpus import Gpus, few
from autobatch.estimates.policy import GENERATIONS, Capability
from autobatch.estimates.suggestions import Change, changes_of, helpful, in_words
from autobatch.estimates.traced_step import TracedStep
from autobatch.footprint.explain import explain
from autobatch.planning import make_plan
from autobatch.rehearsal.setup import build_model, check_loss_of_ranks, whole_batch_notes
from autobatch.report.result import Estimates
from autobatch.step.gradients import gradient_dtype_of, gradient_sum_notes
from autobatch.workload.contract import WholeBatchLoss, Workload
from autobatch.workload.data import WorstCaseSampler
from autobatch.workload.rng import preserved_random_state, seed_everything
from autobatch.workload.streams import scanned, stream_notes

if TYPE_CHECKING:  # importing FSDP takes a second
    from autobatch.distributed.shard import Sharding


class Layout(NamedTuple):
    """The ranks of a step, and what each of them holds."""

    world: int = 1
    parallel: Parallel = "replicate"
    """``shard`` if they share the model, ``replicate`` if each has a whole one."""

    @contextmanager
    def sharding(self) -> Iterator[Sharding | None]:
        """Act as a rank of this layout within the block: rank 0 of a group that exchanges nothing."""
        if self.parallel == "replicate":
            yield None
            return
        from autobatch.distributed.shard import fake_ranks

        with fake_ranks(self.world) as sharding:
            yield sharding


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
        first = scanned(workload)
        (found,) = run_in_copies([lambda: Estimator(first, options, gpus).estimates()])
        return found


class Estimator:
    """Predictions for a workload, of which each footprint is traced once.

    Raises:
        InputError: the model or the data are invalid, or ranks cannot train the loss.
    """

    def __init__(self, workload: Workload, options: Options, gpus: Gpus) -> None:
        check_loss_of_ranks(workload, gpus.world)
        seed_everything(options.seed)
        self._workload, self._options, self._gpus = workload, options, gpus
        is_whole = isinstance(workload.loss, WholeBatchLoss)
        self._whole_batch = options.target_batch if is_whole else None
        self._model, self._build_notes = on_meta(workload)
        self._gradient_dtype = gradient_dtype_of(self._model, options.gradient_dtype)
        self._worst_case = WorstCaseSampler(workload)
        self._worst_case.check_collate()
        self._batch_of = cache(self._worst_case.batch)
        self._known: dict[tuple[Layout, Capability], Footprint] = {}
        """By layout, and by the generation of the GPU."""

    def estimates(self) -> Estimates:
        """Predict for each GPU; for a single one, or if none suffices, also predict what would help."""
        gpus = self._gpus
        found = with_remedies(self.limits(), gpus, self._remedies)
        reasons: dict[str | None, list[str]] = {}
        for estimate in found:
            reasons.setdefault(estimate.parallel_reason, []).append(estimate.profile)
        notes = [f"{few(names)}: {reason}" for reason, names in reasons.items() if reason]
        notes += [*gpus.notes(found), *stream_notes(self._workload.train_data), *self._notes()]
        ordered = found if gpus.are_named else sorted(found, key=need)
        return Estimates(estimates=ordered, notes=list(dict.fromkeys(notes)))

    def limits(self) -> list[Estimate]:
        """Predict what fits on each GPU that was asked about."""
        start, predictions = time.perf_counter(), []
        for gpu in self._gpus.asked:
            layout, reason = self._choose(gpu)
            step = self._footprint(gpu, layout)
            predictions.append(partial(self._limit, gpu, step, layout, reason))
        found = run_in_copies(predictions)
        return [replace(estimate, seconds=time.perf_counter() - start) for estimate in found]

    def step(self, gpu: HardwareProfile, layout: Layout) -> TracedStep:
        """Return what is traced for a GPU."""
        return TracedStep(
            workload=self._workload,
            model=self._model,
            batch_of=self._batch_of,
            precision=self._gpus.precision,
            gradient_dtype=self._gradient_dtype,
            capability=gpu.compute_capability,
            multiple=self._options.micro_batch_multiple,
            samples=self._whole_batch,
            sharding=layout.sharding,
        )

    def _limit(self, gpu: HardwareProfile, step: Footprint, layout: Layout, reason: str | None) -> Estimate:
        """Predict what fits on one GPU, without what would help."""
        budget, source = self._gpus.budget(gpu)
        spending = self._gpus.spending(gpu)
        found = spending.predict(step, self._options.micro_batch)
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
            plan=self._plan(found.micro_batch, step.multiple) if found.fits else None,
            memory={**where.by_kind, "workspaces of cuBLAS": spending.held_bytes},
            modules=where.by_module,
            phase=where.phase,
            world_size=layout.world,
            parallel=layout.parallel if layout.world > 1 else None,
            parallel_reason=reason,
            seconds=0.0,
        )

    def _choose(self, gpu: HardwareProfile) -> tuple[Layout, str | None]:
        """Return the layout that was asked for; else replicas if one sample fits, and shards if not."""
        asked, replicas = self._options.parallel, Layout(self._gpus.world)
        if replicas.world == 1 or asked == "replicate":
            return replicas, None
        reason = None
        if asked != "shard":
            step = self._footprint(gpu, replicas)
            if self._gpus.spending(gpu)._replace(cap=step.multiple).largest(step)[0]:
                return replicas, "a whole model fits on each rank, so each has its own (--parallel replicate)"
            reason = "no whole model fits on a rank, so the ranks share it (--parallel shard)"
        return self._shared(), reason

    def _shared(self) -> Layout:
        """Return the layout of ranks that share a model."""
        # Here, or each copy would import it again.
        import autobatch.distributed.shard  # noqa: F401

        return Layout(self._gpus.world, "shard")

    def _remedies(self, gpu: HardwareProfile) -> list[Remedy]:
        """Return what would let more fit."""
        layout = self._choose(gpu)[0]
        changes = [*changes_of(self.step(gpu, layout))]
        if self._gpus.world > 1 and layout.parallel == "replicate":
            shared = self.step(gpu, self._shared())
            changes.append(Change("shard", "--parallel shard", shared))
        return helpful(self._footprint(gpu, layout), changes, self._gpus.spending(gpu))

    def _footprint(self, gpu: HardwareProfile, layout: Layout) -> Footprint:
        """Return the footprint of a step on a GPU.

        Raises:
            AutobatchError: the step cannot be traced.
        """
        generation = max(GENERATIONS[0], *(first for first in GENERATIONS if first <= gpu.compute_capability))
        if (layout, generation) not in self._known:
            try:
                self._known[layout, generation] = footprint(self.step(gpu, layout))
            except Unpredictable as error:
                raise Unpredictable(
                    f"{error}. autobatch probe --device sim:{gpu.name} runs the step, on the CPU in a model "
                    "of that GPU's allocator"
                ) from error
        return self._known[layout, generation]

    def _plan(self, micro_batch: int, multiple: int) -> Plan | None:
        if self._options.target_batch is None:
            return None
        return make_plan(
            target_batch=self._options.target_batch,
            micro_batch_limit=micro_batch,
            world_size=self._gpus.world,
            multiple=multiple,
            learning_rate=self._workload.learning_rate,
            base_batch=self._workload.base_batch,
            precision=self._gpus.precision,
            gradient_dtype=self._gradient_dtype,
        )

    def _notes(self) -> Iterator[str]:
        """Yield remarks on the workload and its traces, one per line."""
        yield from self._worst_case.notes
        yield from self._build_notes
        yield from whole_batch_notes(self._workload, self._whole_batch)
        yield from gradient_sum_notes(self._model, self._gradient_dtype)
        for step in self._known.values():
            yield from step.notes


def on_meta(workload: Workload) -> tuple[nn.Module, list[str]]:
    """Build the workload's model without memory for its parameters, or on the CPU with a note.

    Raises:
        InputError: ``Workload(model=…)`` returns no module.
        DoesNotFitError: its constructor needs values, for which the memory of this machine does not suffice.
    """
    try:
        with torch.device("meta"):
            return build_model(workload), []
    except InputError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
    with memory_named("the model was built"):
        model = build_model(workload)
    size = format_bytes(sum(p.numel() * p.element_size() for p in model.parameters()))
    return model, [
        f"the model cannot be built on the meta device ({reason}), so it was built on the CPU, where its "
        f"parameters take {size}: let its constructor read no values of tensors"
    ]


def need(estimate: Estimate) -> tuple[bool, int, int]:
    """Return what to sort by: GPUs that need the fewest micro-batches come first, small ones before large."""
    steps = 0 if estimate.plan is None else estimate.plan.accumulation_steps
    return not estimate.fits, steps, estimate.budget_bytes


def with_remedies(
    estimates: Sequence[Estimate], gpus: Gpus, remedies: Callable[[HardwareProfile], list[Remedy]]
) -> list[Estimate]:
    """Add what would help to the only estimate, or to that of the largest GPU if nothing fits on any.

    Raises:
        DoesNotFitError: nothing fits on any; says where the memory of the largest goes, and what helps.
    """
    fits = any(estimate.fits for estimate in estimates)
    if fits and len(estimates) > 1:
        return [*estimates]
    at = max(range(len(estimates)), key=lambda number: estimates[number].budget_bytes)
    most = replace(estimates[at], remedies=remedies(gpus.asked[at]))
    if not fits:
        names = ", ".join(estimate.profile for estimate in estimates)
        where_not = f"not to fit on {names}" if len(estimates) == 1 else f"to fit on none of {names}"
        where = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in list(most.memory.items())[:3])
        raise DoesNotFitError(
            f"a micro-batch of {max(1, most.micro_batch)} is predicted {where_not}: it takes "
            f"{format_bytes(most.peak_reserved_bytes)} ({where}), and {most.profile} has a budget of "
            f"{format_bytes(most.budget_bytes)}. What helps: a larger GPU{in_words(most.remedies)}"
        )
    return [*estimates[:at], most, *estimates[at + 1 :]]
