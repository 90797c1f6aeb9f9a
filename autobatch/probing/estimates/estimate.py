"""Prediction of what fits on hardware that need not be here, from shapes alone.

The model is built on the meta device if its constructor allows that, so that a model of many billions of
parameters needs no memory. The step is traced once for each kind of GPU, with what may help at the same time.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from autobatch.core.errors import DoesNotFitError
from autobatch.core.files import write_output
from autobatch.core.records.base import Precision
from autobatch.core.records.estimate import Estimate, Remedy
from autobatch.core.records.plan import Plan
from autobatch.device.allocator.caching import CachingAllocator
from autobatch.device.hardware_profile import HardwareProfile
from autobatch.device.simulated import simulated_budget
from autobatch.footprint.fit_sizes import Unpredictable
from autobatch.footprint.memory_viz import dump
from autobatch.footprint.predict import gpu_allocator, predict
from autobatch.footprint.remedies import find_remedies
from autobatch.footprint.tracing.apart import run_apart
from autobatch.planning import make_plan
from autobatch.probing.estimates.answer import compared_with_runs, estimate_from, nothing_fits
from autobatch.probing.estimates.layouts import ALONE
from autobatch.probing.estimates.settings import (
    EstimateSettings,
    cap_notes,
    cap_of,
    device_notes,
    named_gpus,
    names_of,
    precision_on,
    spending_on,
)
from autobatch.probing.estimates.single import SinglePrediction, predict_single
from autobatch.probing.estimates.sizes import with_sizes
from autobatch.probing.estimates.traces import Traces
from autobatch.report.result import Estimates
from autobatch.search.cache import prediction_errors
from autobatch.workload.contract import Workload
from autobatch.workload.rng import preserved_random_state, seed_everything
from autobatch.workload.streams import scanned, stream_notes


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
        traces = Traces(workload, settings)
    if len(gpus) == 1:
        traces.prepare(gpus[0].compute_capability, [ALONE], changed=ALONE)
    off = {gpu.name: prediction_errors(home, (gpu.title, *gpu.device_names)) for gpu in gpus}
    estimates = [_estimate(traces, gpu, settings, off[gpu.name]) for gpu in gpus]
    if not names_of(settings):
        estimates.sort(key=_need)
    if settings.memory_viz is not None:
        first = next(gpu for gpu in gpus if gpu.name == estimates[0].profile)
        _write_snapshot(Path(settings.memory_viz), traces, first, estimates[0])
    by_name = {gpu.name: gpu for gpu in gpus}
    estimates = [
        one
        if one.fits and len(gpus) > 1
        else msgspec.structs.replace(one, remedies=_remedies(traces, by_name[one.profile], one, settings))
        for one in estimates
    ]
    if len(gpus) == 1:
        estimates = [_by_size(traces, gpus[0], estimates[0], settings)]
    if estimates and not any(one.fits for one in estimates):
        raise DoesNotFitError(nothing_fits(estimates, settings))
    compared = [compared_with_runs(name, shares) for name, shares in off.items() if shares]
    notes = [*device_notes(settings), *cap_notes(estimates, settings)]
    notes += [*stream_notes(workload.train_data), *traces.notes(), *compared]
    return Estimates(estimates=estimates, notes=list(dict.fromkeys(notes)))


def _need(one: Estimate) -> tuple[float, int]:
    """Return what to sort by: GPUs that need the fewest micro-batches come first, small ones before large."""
    if not one.fits:
        return math.inf, one.budget_bytes
    return (0 if one.plan is None else one.plan.accumulation_steps), one.budget_bytes


def _estimate(
    traces: Traces, gpu: HardwareProfile, settings: EstimateSettings, prediction_errors: list[float]
) -> Estimate:
    start = time.perf_counter()
    budget, source = simulated_budget(gpu, settings.memory_budget)
    precision = precision_on(settings, gpu.compute_capability)
    cap = cap_of(settings)
    try:
        step = traces.step(ALONE, gpu.compute_capability)
    except Unpredictable:
        step, found = _predict_single(traces, gpu, budget, cap, settings)
    else:
        # Runs that took more than predicted widen the interval by as much.
        margins = [step.margin, *(1 - 1 / (1 + residual) for residual in prediction_errors)]
        step = replace(step, margin=max(margins))
        found = predict(
            step,
            budget_bytes=budget,
            cap=cap,
            micro_batch=settings.micro_batch,
            libraries=gpu.libraries,
        )
    plan = _plan(traces, found.micro_batch, precision, settings, step.multiple) if found.fits else None
    made = estimate_from(step, found, gpu, (budget, source), precision)
    return msgspec.structs.replace(made, plan=plan, seconds=time.perf_counter() - start)


def _predict_single(
    traces: Traces, gpu: HardwareProfile, budget: int, cap: int, settings: EstimateSettings
) -> SinglePrediction:
    try:
        return predict_single(traces, gpu, budget_bytes=budget, cap=cap, micro_batch=settings.micro_batch)
    except Unpredictable as error:
        raise Unpredictable(
            f"{error}. autobatch probe --device sim:{gpu.name} runs the step, on the CPU in a model of that "
            "GPU's allocator"
        ) from error


def _write_snapshot(path: Path, traces: Traces, gpu: HardwareProfile, one: Estimate) -> None:
    """Write the memory of the steps at the predicted micro-batch, or at 1 if none fits."""
    step = traces.step(ALONE, gpu.compute_capability)
    trace = step.program.at(max(1, one.micro_batch))
    write_output(path, dump(trace, CachingAllocator(), step.labels), "--memory-viz")


def _remedies(
    traces: Traces, gpu: HardwareProfile, one: Estimate, settings: EstimateSettings
) -> list[Remedy]:
    """Return what would let more fit; nothing if the step follows no rule."""
    capability = gpu.compute_capability
    spending = spending_on(gpu, one.budget_bytes, cap_of(settings))
    with preserved_random_state(), suppress(Unpredictable):
        step, setting = traces.step(ALONE, capability), traces.setting(capability)
        return find_remedies(setting, step, spending, trace=traces.tracer(ALONE, capability))
    return []


def _by_size(traces: Traces, gpu: HardwareProfile, one: Estimate, settings: EstimateSettings) -> Estimate:
    """Add what fits of smaller samples, beside the workspaces of libraries."""
    size, count = gpu.workspaces or (0, 0)
    limit = one.budget_bytes - size * count
    with preserved_random_state():
        return with_sizes(
            one,
            traces.setting(gpu.compute_capability),
            traces.worst_case,
            partial(gpu_allocator, limit),
            cap=cap_of(settings),
            seed=settings.seed,
        )


def _plan(
    traces: Traces, micro_batch: int, precision: Precision, settings: EstimateSettings, multiple: int
) -> Plan | None:
    if settings.target_batch is None:
        return None
    return make_plan(
        target_batch=settings.target_batch,
        micro_batch_limit=micro_batch,
        multiple=multiple,
        learning_rate=traces.workload.learning_rate,
        base_batch=traces.workload.base_batch,
        precision=precision,
        gradient_dtype=traces.gradient_dtype,
    )
