"""``estimate``: what fits on hardware that need not be here, predicted from shapes alone.

The model is built on the meta device where its constructor allows that, so that a model of many billions of
parameters needs no memory; the step is traced once for each kind of card.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import msgspec
import torch
from torch import nn

from autobatch.core.errors import AutobatchError, DoesNotFitError
from autobatch.core.options import EstimateOptions
from autobatch.core.records import Estimate, Plan, Precision, Remedy
from autobatch.core.units import format_bytes
from autobatch.device.allocator.caching import AllocatorConfig, CachingAllocator
from autobatch.device.profiles import HardwareProfile, data_home, list_profiles, load_profile
from autobatch.device.simulated import simulated_budget
from autobatch.footprint.explain import explain
from autobatch.footprint.predict import Footprint, footprint, predict
from autobatch.footprint.remedies import NATIVE_BF16, Spending, find_remedies, in_words
from autobatch.footprint.trace_step import Setting
from autobatch.planning import make_plan
from autobatch.probing.cache import prediction_errors
from autobatch.probing.setup import build_model, find_workload, whole_batch_notes, whole_batch_of
from autobatch.report.result import Estimates
from autobatch.workload.contract import Workload
from autobatch.workload.data import WorstCaseSampler
from autobatch.workload.rng import preserved_random_state, seed_everything


def run_estimate(
    workload: Workload | str | None, options: EstimateOptions, environ: Mapping[str, str]
) -> Estimates:
    """Predict what fits; touches no card.

    Raises:
        InputError: an option, a profile or the workload cannot be.
        Unpredictable: the step cannot be traced; says why.
        DoesNotFitError: not even a micro-batch of 1 fits on any of the cards.
    """
    home = data_home(environ)
    simulated = [options.device.removeprefix("sim:")] if options.device.startswith("sim:") else []
    names = options.profile or simulated
    gpus = (
        [load_profile(name, user_dir=home) for name in names]
        if names
        else list(list_profiles(user_dir=home).profiles)
    )
    found = find_workload(workload)
    with preserved_random_state():
        seed_everything(options.seed)
        tracer = _Tracer(found, whole_batch_of(found, options))
    off = {gpu.name: prediction_errors(home, (gpu.title, *gpu.device_names)) for gpu in gpus}
    estimates = [_estimate(tracer, gpu, options, off[gpu.name]) for gpu in gpus]
    if len(gpus) == 1:
        remedies = _remedies(tracer, gpus[0], estimates[0], options)
        estimates = [msgspec.structs.replace(estimates[0], remedies=remedies)]
    if estimates and not any(one.fits for one in estimates):
        raise DoesNotFitError(_nothing_fits(estimates, options))
    compared = [_compared(name, shares) for name, shares in off.items() if shares]
    notes = dict.fromkeys([*tracer.worst_case.notes, *tracer.notes(), *compared])
    return Estimates(estimates=estimates, notes=list(notes))


class _Tracer:
    """Traces a workload once for each way in which cards run it."""

    def __init__(self, workload: Workload, window: int | None) -> None:
        self.workload = workload
        self.window = window
        self.model = on_meta(workload)
        self.worst_case = WorstCaseSampler(workload)
        self.worst_case.check_collate()
        self._steps: dict[tuple[bool, Precision], Footprint] = {}

    def trace(self, capability: tuple[int, int], precision: Precision) -> Footprint:
        """The footprint on cards of a compute capability."""
        # What a step allocates differs only between cards with and without flash attention and bf16.
        key = (capability >= NATIVE_BF16, precision)
        if key not in self._steps:
            tested = bool(self._steps)
            self._steps[key] = footprint(self.setting(capability, precision), tested=tested)
        return self._steps[key]

    def setting(self, capability: tuple[int, int], precision: Precision) -> Setting:
        """What is traced for them."""
        return Setting(
            workload=self.workload,
            model=self.model,
            batch_of=self.worst_case.batch,
            precision=precision,
            capability=capability,
            samples=self.window,
        )

    def notes(self) -> Iterator[str]:
        """What a person should know of the traces."""
        yield from whole_batch_notes(self.workload, self.window)
        for step in self._steps.values():
            yield from step.notes


def on_meta(workload: Workload) -> nn.Module:
    """The workload's model without memory for its parameters; with it, where the constructor needs values."""
    try:
        with torch.device("meta"):
            return build_model(workload)
    except AutobatchError:
        raise
    except Exception:
        return build_model(workload)


def _compared(name: str, shares: list[float]) -> str:
    """What runs on a card said of traces there."""
    low, high = min(shares), max(shares)
    return (
        f"{name}: runs on this machine took {low:+.1%} to {high:+.1%} more than predicted "
        f"({len(shares)} compared)"
    )


def _estimate(
    tracer: _Tracer, gpu: HardwareProfile, options: EstimateOptions, prediction_errors: list[float]
) -> Estimate:
    start = time.perf_counter()
    budget, source = simulated_budget(gpu, options.memory_budget)
    precision = _precision(options, gpu.compute_capability)
    step = tracer.trace(gpu.compute_capability, precision)
    # Runs that took more than predicted widen the interval: what is predicted must then be so much smaller.
    margins = [step.margin, *(1 - 1 / (1 + residual) for residual in prediction_errors)]
    step = replace(step, margin=max(margins))
    found = predict(
        step,
        budget_bytes=budget,
        cap=_cap(tracer.workload, options),
        micro_batch=options.micro_batch,
        workspaces=gpu.workspaces,
    )
    where = explain(step, max(1, found.micro_batch))
    return Estimate(
        profile=gpu.name,
        budget_bytes=budget,
        budget_source=source,
        precision=precision,
        micro_batch=found.micro_batch,
        micro_batch_low=found.micro_batch_low,
        micro_batch_high=found.micro_batch_high,
        fits=found.fits,
        peak_allocated_bytes=found.peak_allocated_bytes,
        peak_reserved_bytes=found.peak_reserved_bytes,
        seconds=time.perf_counter() - start,
        plan=_plan(tracer.workload, found.micro_batch, precision, options) if found.fits else None,
        retries=found.outcome.retries,
        memory=where.by_kind,
        modules=where.by_module,
        phase=where.phase,
    )


def _remedies(tracer: _Tracer, gpu: HardwareProfile, one: Estimate, options: EstimateOptions) -> list[Remedy]:
    capability = gpu.compute_capability

    def allocator(limit: int | None, expandable: bool) -> CachingAllocator:
        return CachingAllocator(limit, AllocatorConfig(expandable_segments=expandable))

    spending = Spending(
        allocator=partial(allocator, one.budget_bytes),
        unlimited=partial(allocator, None),
        cap=_cap(tracer.workload, options),
        workspaces=gpu.workspaces,
    )
    with preserved_random_state():
        step = tracer.trace(capability, one.precision)
        return find_remedies(tracer.setting(capability, one.precision), step, spending)


def _cap(workload: Workload, options: EstimateOptions) -> int:
    caps = [len(workload.train_data)]  # type: ignore[arg-type]
    return min(caps + [cap for cap in (options.max_micro_batch, options.target_batch) if cap is not None])


def _precision(options: EstimateOptions, capability: tuple[int, int]) -> Precision:
    if options.precision != "auto":
        return options.precision
    return "bf16" if capability >= NATIVE_BF16 else "fp32"


def _plan(
    workload: Workload, micro_batch: int, precision: Precision, options: EstimateOptions
) -> Plan | None:
    if options.target_batch is None:
        return None
    return make_plan(
        target_batch=options.target_batch,
        micro_batch_limit=micro_batch,
        learning_rate=workload.learning_rate,
        base_batch=workload.base_batch,
        precision=precision,
    )


def _nothing_fits(estimates: list[Estimate], options: EstimateOptions) -> str:
    asked = 1 if options.micro_batch is None else options.micro_batch
    most = max(estimates, key=lambda one: one.budget_bytes)
    where = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in list(most.memory.items())[:3])
    names = ", ".join(one.profile for one in estimates)
    where_not = f"not to fit on {names}" if len(estimates) == 1 else f"to fit on none of {names}"
    return (
        f"a micro-batch of {asked} is predicted {where_not}: it takes "
        f"{format_bytes(most.peak_reserved_bytes)} ({where}), and {most.profile} has "
        f"{format_bytes(most.budget_bytes)} to spend; what would help: a larger card{in_words(most.remedies)}"
    )
