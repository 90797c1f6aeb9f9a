"""Prediction of what fits on hardware that need not be here, from shapes alone.

The model is built on the meta device if its constructor allows that, so that a model of many billions of
parameters needs no memory. The step is traced once for each kind of GPU.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import torch
from torch import nn

from autobatch.core.errors import AutobatchError, DoesNotFitError
from autobatch.core.files import write_output
from autobatch.core.records.base import GradientDtype, Precision
from autobatch.core.records.estimate import Estimate, Remedy
from autobatch.core.records.plan import Plan
from autobatch.core.units import format_bytes
from autobatch.device.allocator.caching import AllocatorConfig, CachingAllocator
from autobatch.device.hardware_profile import HardwareProfile
from autobatch.device.profiles import list_profiles, load_profile
from autobatch.device.simulated import simulated_budget
from autobatch.footprint.depth import deep_footprint
from autobatch.footprint.explain import explain
from autobatch.footprint.memory_viz import dump
from autobatch.footprint.predict import Footprint, Prediction, predict
from autobatch.footprint.remedies import NATIVE_BF16, Spending, Trace, find_remedies, in_words, trace_change
from autobatch.footprint.tracing.apart import run_apart
from autobatch.footprint.tracing.trace_step import Setting
from autobatch.planning import make_plan
from autobatch.probing.cache import prediction_errors
from autobatch.probing.estimates.sizes import with_sizes
from autobatch.probing.setup import whole_batch_notes, whole_batch_of
from autobatch.probing.setup_model import build_model
from autobatch.report.result import Estimates
from autobatch.step.gradients import gradient_dtype_of, gradient_sum_notes
from autobatch.workload.contract import Workload
from autobatch.workload.data import WorstCaseSampler
from autobatch.workload.rng import preserved_random_state, seed_everything
from autobatch.workload.streams import ENDLESS, is_open_ended, scanned, stream_notes


@dataclass(frozen=True, kw_only=True)
class EstimateSettings:
    """Settings of an estimate: plain values."""

    device: str = "auto"
    """``sim:PROFILE`` names a GPU if ``profiles`` names none."""
    memory_budget: str | int | None = None
    """None for the GPU's memory less a headroom."""
    precision: Precision | Literal["auto"] = "auto"
    gradient_dtype: GradientDtype | Literal["auto"] = "auto"
    seed: int = 0
    profiles: Sequence[str] = ()
    """Names or files of hardware profiles; empty for all."""
    micro_batch: int | None = None
    """The micro-batch to predict; None to search the largest."""
    max_micro_batch: int | None = None
    target_batch: int | None = None
    """None for no plan."""
    scan: int | None = None
    """Samples of a stream to plan from; None for the default."""
    memory_viz: str | None = None
    """File for the memory of steps on the first GPU; None for no file."""


def estimate_limits(workload: Workload, settings: EstimateSettings, *, home: Path) -> Estimates:
    """Predict what fits. No GPU is touched.

    Args:
        workload: what to train.
        settings: what to predict.
        home: data directory, with saved profiles and limits.

    Raises:
        InputError: a profile or the workload is invalid.
        Unpredictable: the step cannot be traced; the message says why.
        DoesNotFitError: not even a micro-batch of 1 fits on any of the GPUs.
    """
    # The model is built without memory, and its code may keep what it builds.
    return run_apart(lambda: _estimates(workload, settings, home))


def _estimates(workload: Workload, settings: EstimateSettings, home: Path) -> Estimates:
    workload = scanned(workload, settings.scan)
    gpus = named_gpus(settings, home)
    with preserved_random_state():
        seed_everything(settings.seed)
        tracer = _Tracer(workload, settings)
    off = {gpu.name: prediction_errors(home, (gpu.title, *gpu.device_names)) for gpu in gpus}
    estimates = [_estimate(tracer, gpu, settings, off[gpu.name]) for gpu in gpus]
    if not _names(settings):
        estimates.sort(key=_need)
    if settings.memory_viz is not None:
        first = next(gpu for gpu in gpus if gpu.name == estimates[0].profile)
        _write_snapshot(Path(settings.memory_viz), tracer, first, estimates[0])
    by_name = {gpu.name: gpu for gpu in gpus}
    estimates = [
        one
        if one.fits and len(gpus) > 1
        else msgspec.structs.replace(one, remedies=_remedies(tracer, by_name[one.profile], one, settings))
        for one in estimates
    ]
    if len(gpus) == 1:
        estimates = [_by_size(tracer, gpus[0], estimates[0], settings)]
    if estimates and not any(one.fits for one in estimates):
        raise DoesNotFitError(nothing_fits(estimates, settings))
    compared = [_compared(name, shares) for name, shares in off.items() if shares]
    notes = dict.fromkeys(
        [
            *device_notes(settings),
            *stream_notes(workload.train_data),
            *tracer.worst_case.notes,
            *tracer.notes(),
            *compared,
        ]
    )
    return Estimates(estimates=estimates, notes=list(notes))


def named_gpus(settings: EstimateSettings, home: Path) -> list[HardwareProfile]:
    """Return the GPUs that settings name, or all that are known.

    Raises:
        InputError: a profile is unknown or invalid.
    """
    names = _names(settings)
    if names:
        return [load_profile(name, user_dir=home) for name in names]
    return list(list_profiles(user_dir=home).profiles)


def _names(settings: EstimateSettings) -> Sequence[str]:
    simulated = [settings.device.removeprefix("sim:")] if settings.device.startswith("sim:") else []
    return settings.profiles or simulated


def _need(one: Estimate) -> tuple[float, int]:
    """Return what to sort by: GPUs that need the fewest micro-batches come first, small ones before large."""
    if not one.fits:
        return math.inf, one.budget_bytes
    return (0 if one.plan is None else one.plan.accumulation_steps), one.budget_bytes


def device_notes(settings: EstimateSettings) -> list[str]:
    """Return that a device of this machine is left out, which a config file may name for all commands."""
    if settings.device == "auto" or (settings.device.startswith("sim:") and not settings.profiles):
        return []
    return [
        f"an estimate touches no device, so --device {settings.device} was left out: name a GPU with "
        "--profile or --device sim:PROFILE"
    ]


class _Tracer:
    """Traces of a workload, one for each way in which GPUs run it."""

    def __init__(self, workload: Workload, settings: EstimateSettings) -> None:
        self.workload = workload
        self.whole_batch = whole_batch_of(workload, settings.target_batch)
        self.model = on_meta(workload)
        self.gradient_dtype = gradient_dtype_of(self.model, settings.gradient_dtype)
        self.worst_case = WorstCaseSampler(workload)
        self.worst_case.check_collate()
        self._steps: dict[tuple[bool, Precision], Footprint] = {}
        self._changed: dict[tuple[bool, Precision, str], Footprint | AutobatchError] = {}

    def trace(self, capability: tuple[int, int], precision: Precision) -> Footprint:
        """Return the footprint on GPUs of a compute capability."""
        # Allocations differ only between GPUs with and without flash attention and bf16.
        key = (capability >= NATIVE_BF16, precision)
        if key not in self._steps:
            tested = bool(self._steps)
            self._steps[key] = deep_footprint(self.setting(capability, precision), tested=tested).step
        return self._steps[key]

    def trace_change(self, capability: tuple[int, int], precision: Precision) -> Trace:
        """Return a function that traces a change for these GPUs, once for all of them.

        Raises:
            AutobatchError: from the function, if the change cannot be traced.
        """

        def trace(name: str, changed: Setting) -> Footprint:
            key = (capability >= NATIVE_BF16, precision, name)
            if key not in self._changed:
                try:
                    self._changed[key] = trace_change(name, changed)
                except AutobatchError as error:
                    self._changed[key] = error
            found = self._changed[key]
            if isinstance(found, AutobatchError):
                raise found
            return found

        return trace

    def setting(self, capability: tuple[int, int], precision: Precision) -> Setting:
        """Return what is traced for them."""
        return Setting(
            workload=self.workload,
            model=self.model,
            batch_of=self.worst_case.batch,
            precision=precision,
            gradient_dtype=self.gradient_dtype,
            capability=capability,
            samples=self.whole_batch,
        )

    def notes(self) -> Iterator[str]:
        """Yield remarks on the traces, one per line."""
        yield from whole_batch_notes(self.workload, self.whole_batch)
        yield from gradient_sum_notes(self.model, self.gradient_dtype)
        for step in self._steps.values():
            yield from step.notes


def on_meta(workload: Workload) -> nn.Module:
    """Build the workload's model without memory for its parameters, if its constructor allows that."""
    try:
        with torch.device("meta"):
            return build_model(workload)
    except AutobatchError:
        raise
    except Exception:
        return build_model(workload)


def _compared(name: str, shares: list[float]) -> str:
    """Compare runs on a GPU with traces for it, in one sentence."""
    low, high = min(shares), max(shares)
    return (
        f"{name}: runs on this machine took {low:+.1%} to {high:+.1%} more than predicted "
        f"({len(shares)} compared)"
    )


def _estimate(
    tracer: _Tracer, gpu: HardwareProfile, settings: EstimateSettings, prediction_errors: list[float]
) -> Estimate:
    start = time.perf_counter()
    budget, source = simulated_budget(gpu, settings.memory_budget)
    precision = precision_on(settings, gpu.compute_capability)
    step = tracer.trace(gpu.compute_capability, precision)
    # Runs that took more than predicted widen the interval by as much.
    margins = [step.margin, *(1 - 1 / (1 + residual) for residual in prediction_errors)]
    step = replace(step, margin=max(margins))
    found = predict(
        step,
        budget_bytes=budget,
        cap=cap_of(tracer.workload, settings),
        micro_batch=settings.micro_batch,
        workspaces=gpu.workspaces,
    )
    plan = _plan(tracer, found.micro_batch, precision, settings) if found.fits else None
    made = estimate_from(step, found, gpu, (budget, source), precision)
    return msgspec.structs.replace(made, plan=plan, seconds=time.perf_counter() - start)


def estimate_from(
    step: Footprint,
    found: Prediction,
    gpu: HardwareProfile,
    budget: tuple[int, str],
    precision: Precision,
) -> Estimate:
    """Build the estimate for a GPU from a prediction, without a plan and its duration.

    Args:
        step: the footprint that was predicted from.
        found: the prediction.
        gpu: the GPU.
        budget: bytes of the budget, and its origin in words.
        precision: precision of the step.
    """
    where = explain(step, max(1, found.micro_batch))
    return Estimate(
        profile=gpu.name,
        budget_bytes=budget[0],
        budget_source=budget[1],
        precision=precision,
        micro_batch=found.micro_batch,
        micro_batch_low=found.micro_batch_low,
        micro_batch_high=found.micro_batch_high,
        fits=found.fits,
        peak_allocated_bytes=found.peak_allocated_bytes,
        peak_reserved_bytes=found.peak_reserved_bytes,
        seconds=0.0,
        plan=None,
        retries=found.outcome.retries,
        memory=where.by_kind,
        modules=where.by_module,
        phase=where.phase,
    )


def _write_snapshot(path: Path, tracer: _Tracer, gpu: HardwareProfile, one: Estimate) -> None:
    """Write the memory of the steps at the predicted micro-batch, or at 1 if none fits."""
    step = tracer.trace(gpu.compute_capability, one.precision)
    trace = step.program.at(max(1, one.micro_batch))
    write_output(path, dump(trace, CachingAllocator(), step.labels), "--memory-viz")


def _remedies(
    tracer: _Tracer, gpu: HardwareProfile, one: Estimate, settings: EstimateSettings
) -> list[Remedy]:
    capability = gpu.compute_capability
    spending = spending_on(gpu, one.budget_bytes, cap_of(tracer.workload, settings))
    with preserved_random_state():
        step = tracer.trace(capability, one.precision)
        setting = tracer.setting(capability, one.precision)
        return find_remedies(setting, step, spending, trace=tracer.trace_change(capability, one.precision))


def spending_on(gpu: HardwareProfile, budget_bytes: int, cap: int) -> Spending:
    """Return the budget of a GPU, and the largest micro-batch to spend it on."""

    def allocator(limit: int | None, expandable: bool) -> CachingAllocator:
        return CachingAllocator(limit, AllocatorConfig(expandable_segments=expandable))

    return Spending(
        allocator=partial(allocator, budget_bytes),
        unlimited=partial(allocator, None),
        cap=cap,
        workspaces=gpu.workspaces,
    )


def _by_size(tracer: _Tracer, gpu: HardwareProfile, one: Estimate, settings: EstimateSettings) -> Estimate:
    """Add what fits of smaller samples, beside the workspaces of libraries."""
    size, count = gpu.workspaces or (0, 0)
    limit = one.budget_bytes - size * count
    with preserved_random_state():
        return with_sizes(
            one,
            tracer.setting(gpu.compute_capability, one.precision),
            tracer.worst_case,
            partial(CachingAllocator, limit, AllocatorConfig()),
            cap=cap_of(tracer.workload, settings),
            seed=settings.seed,
        )


def cap_of(workload: Workload, settings: EstimateSettings) -> int:
    """Return the largest micro-batch to try."""
    data = workload.train_data
    caps = [ENDLESS if is_open_ended(data) else len(data)]  # type: ignore[arg-type]
    return min(caps + [cap for cap in (settings.max_micro_batch, settings.target_batch) if cap is not None])


def precision_on(settings: EstimateSettings, capability: tuple[int, int]) -> Precision:
    """Return the precision that was asked for; else bf16 where it is native."""
    if settings.precision != "auto":
        return settings.precision
    return "bf16" if capability >= NATIVE_BF16 else "fp32"


def _plan(tracer: _Tracer, micro_batch: int, precision: Precision, settings: EstimateSettings) -> Plan | None:
    if settings.target_batch is None:
        return None
    return make_plan(
        target_batch=settings.target_batch,
        micro_batch_limit=micro_batch,
        learning_rate=tracer.workload.learning_rate,
        base_batch=tracer.workload.base_batch,
        precision=precision,
        gradient_dtype=tracer.gradient_dtype,
    )


def nothing_fits(estimates: list[Estimate], settings: EstimateSettings) -> str:
    """Write that a micro-batch fits on no GPU, where its memory goes, and what helps."""
    asked = 1 if settings.micro_batch is None else settings.micro_batch
    most = max(estimates, key=lambda one: one.budget_bytes)
    where = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in list(most.memory.items())[:3])
    names = ", ".join(one.profile for one in estimates)
    where_not = f"not to fit on {names}" if len(estimates) == 1 else f"to fit on none of {names}"
    return (
        f"a micro-batch of {asked} is predicted {where_not}: it takes "
        f"{format_bytes(most.peak_reserved_bytes)} ({where}), and {most.profile} has a budget of "
        f"{format_bytes(most.budget_bytes)}. What helps: a larger GPU{in_words(most.remedies)}"
    )
