"""Prediction of what fits on hardware that need not be here, from shapes alone.

The model is built on the meta device if its constructor allows that, so that a model of many billions of
parameters needs no memory. A rank that has a whole model is traced with the buffer in which ranks sum their
gradients; a rank that has a part of it is traced through FSDP2 itself, as rank 0 of a process group that
exchanges nothing. Allocations differ between GPUs that run other kernels, between ways to share a step among
ranks, and with each change that may help: none is suggested by a rule of thumb. It is applied to the fake
copy of the model as training would apply it. Everything else, for example the budget, is a replay.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from msgspec.structs import replace
from torch import nn

from autobatch.core.errors import DoesNotFitError, InputError
from autobatch.core.options import Options
from autobatch.core.records import CHECKPOINTING, COMPILE, OPTIMIZER, Estimate, Parallel, Remedy
from autobatch.core.units import format_bytes
from autobatch.device.cpu import SimulatedDevice
from autobatch.device.oom import memory_named
from autobatch.device.profiles import HardwareProfile
from autobatch.estimates.copies import run_in_copies
from autobatch.estimates.gpus import Budget, Gpus, few
from autobatch.estimates.policy import AMPERE
from autobatch.estimates.traced_step import Footprint, TracedStep, Unpredictable, footprint, footprints
from autobatch.footprint.explain import explain
from autobatch.planning import make_plan
from autobatch.rehearsal.setup import (
    Setup,
    build_model,
    check_loss_of_ranks,
    describe_setup,
    whole_batch_notes,
)
from autobatch.report.result import Estimates
from autobatch.step.apply_knobs import recomputable_blocks
from autobatch.step.gradients import gradient_dtype_of, gradient_sum_notes, low_precision_parameters
from autobatch.step.train_state import stand_in_optimizers
from autobatch.workload.contract import WholeBatchLoss, Workload
from autobatch.workload.data import WorstCaseSampler
from autobatch.workload.rng import preserved_random_state, seed_everything
from autobatch.workload.streams import scanned, stream_notes

if TYPE_CHECKING:  # importing FSDP takes a second
    from autobatch.distributed.shard import Sharding

EXPANDABLE = "expandable_segments", "PYTORCH_ALLOC_CONF=expandable_segments:True"
"""Name and advice of the change that needs no trace of its own."""
LEAST_CHANGE = 0.01
"""Share by which the peak must fall if the micro-batch does not grow."""


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
        self._options, self._gpus = options, gpus
        model, self._build_notes = on_meta(workload)
        self._setup = Setup(
            workload=workload,
            model=model,
            device=SimulatedDevice(gpus.asked[0], options.memory_budget),
            worst_case=WorstCaseSampler(workload),
            precision=options.precision,
            gradient_dtype=gradient_dtype_of(model, options.gradient_dtype),
            whole_batch=options.target_batch if isinstance(workload.loss, WholeBatchLoss) else None,
        )
        self._setup.worst_case.check_collate()
        self._known: dict[tuple[Parallel, bool], Footprint] = {}
        """By what ranks do with the model, and whether the GPU is one of Ampere or later."""

    def estimates(self) -> Estimates:
        """Predict for each GPU; for a single one, or if none suffices, also predict what would help."""
        setup, limits = self._setup, self.limits()
        reasons: dict[str | None, list[str]] = {}
        for estimate in limits:
            reasons.setdefault(estimate.parallel_reason, []).append(estimate.profile)
        notes = [
            *(f"{few(names)}: {reason}" for reason, names in reasons.items() if reason),
            *self._gpus.notes(limits),
            *stream_notes(setup.workload.train_data),
            *setup.worst_case.notes,
            *self._build_notes,
            *whole_batch_notes(setup.workload, setup.whole_batch),
            *gradient_sum_notes(setup.model, setup.gradient_dtype),
            *(note for step in self._known.values() for note in step.notes),
        ]
        return with_remedies(limits, notes, self._gpus, self._remedies)

    def limits(self) -> list[Estimate]:
        """Predict what fits on each GPU that was asked about."""
        start, predictions = time.perf_counter(), []
        for gpu in self._gpus.asked:
            parallel, reason = self._choose(gpu)
            step = self._footprint(gpu, parallel)
            predictions.append(partial(self._limit, gpu, step, parallel, reason))
        found = run_in_copies(predictions)
        return [replace(estimate, seconds=time.perf_counter() - start) for estimate in found]

    def step(self, gpu: HardwareProfile, parallel: Parallel = "replicate") -> TracedStep:
        """Return what is traced for a GPU of ranks that share the model, or have a whole one each."""
        sharding: Callable[[], AbstractContextManager[Sharding | None]] = nullcontext
        if parallel == "shard":
            # Importing FSDP takes a second. Here, or each copy of this process would do it again.
            from autobatch.distributed.shard import fake_ranks

            sharding = partial(fake_ranks, self._gpus.world)
        return TracedStep(
            setup=self._setup,
            capability=gpu.compute_capability,
            multiple=self._options.micro_batch_multiple,
            sharding=sharding,
        )

    def _limit(
        self, gpu: HardwareProfile, step: Footprint, parallel: Parallel, reason: str | None
    ) -> Estimate:
        """Predict what fits on one GPU, without what would help."""
        budget, options, setup = self._gpus.budget(gpu), self._options, self._setup
        found, plan = budget.predict(step, options.micro_batch), None
        if found.fits and options.target_batch is not None:
            plan = make_plan(
                target_batch=options.target_batch,
                micro_batch_limit=found.micro_batch,
                world_size=self._gpus.world,
                multiple=step.multiple,
                learning_rate=setup.workload.learning_rate,
                base_batch=setup.workload.base_batch,
                precision=setup.precision,
                gradient_dtype=setup.gradient_dtype,
            )
        where = explain(step.program.at(max(1, found.micro_batch)))
        return replace(
            found,
            precision=setup.precision,
            plan=plan,
            memory={**where.by_kind, "workspaces of cuBLAS": budget.held_bytes},
            modules=where.by_module,
            phase=where.phase,
            world_size=self._gpus.world,
            parallel=parallel if self._gpus.world > 1 else None,
            parallel_reason=reason,
        )

    def _choose(self, gpu: HardwareProfile) -> tuple[Parallel, str | None]:
        """Return what was asked for; else a whole model for each rank if one sample fits, and why."""
        asked = self._options.parallel
        if self._gpus.world == 1 or asked == "replicate":
            return "replicate", None
        if asked == "shard":
            return "shard", None
        step = self._footprint(gpu, "replicate")
        if self._gpus.budget(gpu)._replace(cap=step.multiple).largest(step)[0]:
            return "replicate", "a whole model fits on each rank, so each has its own (--parallel replicate)"
        return "shard", "no whole model fits on a rank, so the ranks share it (--parallel shard)"

    def _remedies(self, gpu: HardwareProfile) -> list[Remedy]:
        """Return what would let more fit."""
        parallel = self._choose(gpu)[0]
        changes = [*changes_of(self.step(gpu, parallel))]
        if self._gpus.world > 1 and parallel == "replicate":
            changes.append(Change("shard", "--parallel shard", self.step(gpu, "shard")))
        return helpful(self._footprint(gpu, parallel), changes, self._gpus.budget(gpu))

    def _footprint(self, gpu: HardwareProfile, parallel: Parallel) -> Footprint:
        """Return the footprint of a step on a GPU.

        Raises:
            AutobatchError: the step cannot be traced.
        """
        key = parallel, gpu.compute_capability >= AMPERE
        if key not in self._known:
            try:
                self._known[key] = footprint(self.step(gpu, parallel))
            except Unpredictable as error:
                raise Unpredictable(
                    f"{error}. autobatch probe --device sim:{gpu.name} runs the step, on the CPU in a model "
                    "of that GPU's allocator"
                ) from error
        return self._known[key]


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


def with_remedies(
    estimates: Sequence[Estimate],
    notes: Iterable[str],
    gpus: Gpus,
    remedies: Callable[[HardwareProfile], list[Remedy]],
) -> Estimates:
    """Return estimates with what would help on the only GPU, or on the largest if nothing fits on any.

    If all GPUs are asked about, those that need the fewest micro-batches come first, small ones before large.

    Raises:
        DoesNotFitError: nothing fits on any; says where the memory of the largest goes, and what helps.
    """
    found = [*estimates]
    fits = any(estimate.fits for estimate in found)
    if not fits or len(found) == 1:
        at = max(range(len(found)), key=lambda number: found[number].budget_bytes)
        found[at] = most = replace(found[at], remedies=remedies(gpus.asked[at]))
    if not fits:
        names = ", ".join(estimate.profile for estimate in found)
        where_not = f"not to fit on {names}" if len(found) == 1 else f"to fit on none of {names}"
        where = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in list(most.memory.items())[:3])
        raise DoesNotFitError(
            f"a micro-batch of {max(1, most.micro_batch)} is predicted {where_not}: it takes "
            f"{format_bytes(most.peak_reserved_bytes)} ({where}), and {most.profile} has a budget of "
            f"{format_bytes(most.budget_bytes)}. What helps: a larger GPU{in_words(most.remedies)}"
        )
    if not gpus.are_named:
        found.sort(
            key=lambda one: (not one.fits, one.plan.accumulation_steps if one.plan else 0, one.budget_bytes)
        )
    return Estimates(estimates=found, notes=list(dict.fromkeys(notes)))


class Change(NamedTuple):
    """A change that may let more fit."""

    name: str
    advice: str
    """Instruction, in words."""
    step: TracedStep
    """The step with the change."""


def suggest(setup: Setup) -> list[Remedy]:
    """Return the changes that let more of a setup fit in the budget of its device; see `helpful`.

    Raises:
        AutobatchError: the step cannot be traced.
    """
    info = describe_setup(setup)
    # A compiled model is traced as its module.
    knobs = {name: value for name, value in setup.knobs.items() if name != COMPILE}
    step = TracedStep(
        setup=dataclasses.replace(setup, knobs=knobs),
        capability=setup.device.compute_capability,
        sharding=partial(nullcontext, setup.sharding),
    )
    device = info.device
    allocator = info.new_allocator
    budget = Budget(device.name, device.budget_bytes, device.budget_source, allocator, info.samples)
    return helpful(footprint(step), [*changes_of(step)], budget)


def helpful(plain: Footprint, changes: Sequence[Change], budget: Budget) -> list[Remedy]:
    """Return the changes with which more fits in a budget, those that gain most first.

    One that cannot be traced is left out. If nothing fits with any change, those that lower the peak are
    returned, with a micro-batch of 0.
    """
    traced = zip(changes, footprints([change.step for change in changes]), strict=True)
    tried = [
        (change.name, change.advice, budget, found)
        for change, found in traced
        if isinstance(found, Footprint)
    ]
    if budget.new_allocator(None).is_expandable is False:
        expandable = budget._replace(new_allocator=partial(budget.new_allocator, expandable=True))
        tried.append((*EXPANDABLE, expandable, plain))
    asked = [partial(of.largest, step) for _, _, of, step in tried]
    (now, peak), *largest = run_in_copies([partial(budget.largest, plain), *asked])
    remedies = [
        Remedy(name=name, advice=advice, micro_batch=size, peak_bytes=then)
        for (name, advice, _, _), (size, then) in zip(tried, largest, strict=True)
        if size > now or (size == now and then <= (1 - LEAST_CHANGE) * peak)
    ]
    return sorted(remedies, key=lambda remedy: (-remedy.micro_batch, remedy.peak_bytes))


def in_words(suggestions: Sequence[Remedy] | None) -> str:
    """Write suggestions as the end of a sentence, empty without any."""
    effects = (
        f"{one.advice} (not enough alone: a micro-batch of 1 is predicted to take "
        f"{format_bytes(one.peak_bytes)} with it)"
        if one.micro_batch == 0
        else f"{one.advice} (a micro-batch of {one.micro_batch:,} is predicted to fit with it)"
        for one in suggestions or ()
    )
    return "".join(f", {effect}" for effect in effects)


def changes_of(step: TracedStep) -> Iterator[Change]:
    """Yield the changes that need a trace of their own."""
    setup, knobs = step.setup, step.setup.knobs
    if knobs.get(CHECKPOINTING) != "full" and recomputable_blocks(setup.model):
        advice = "activation checkpointing of the repeated blocks"
        yield Change("checkpointing", advice, step.changed(knobs={**knobs, CHECKPOINTING: "full"}))
    if setup.precision == "fp32" and (step.capability is None or step.capability >= AMPERE):
        yield Change("bf16", "--precision bf16", step.changed(precision="bf16"))
    if setup.gradient_dtype == "fp32" and low_precision_parameters(setup.model):
        advice = "--gradient-dtype weights, which rounds the gradient after each micro-batch"
        yield Change("gradient_dtype", advice, step.changed(gradient_dtype="weights"))
    # On the CPU an optimizer updates one parameter at a time, and a fused one saves nothing.
    if step.capability is not None and knobs.get(OPTIMIZER) != "fused":
        made = stand_in_optimizers(setup.workload)
        if not made or any(one.defaults.get("fused", True) in (None, False) for one in made):
            advice = "a fused optimizer (fused=True)"
            yield Change("fused", advice, step.changed(knobs={**knobs, OPTIMIZER: "fused"}))
