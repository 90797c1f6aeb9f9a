"""The library calls: probe, plan, tune and fit.

    workload ──► probe ──► plan ──► tune ──► train ──► report
                   ▲ what fitted before, confirmed by one run

Each takes the options of the command of the same name as keywords; the command line makes the same calls with
an `Environment` that prints, and that probes in a child process.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec

from autobatch.config import EstimateOptions, FitOptions, PlanOptions, ProbeOptions, TuneOptions, options_from
from autobatch.estimating import Estimates, run_estimate
from autobatch.fitting import run_fit_command
from autobatch.rating import run_tune_command
from autobatch.records import DeviceRecord, Plan, Probe
from autobatch.results import Result
from autobatch.stages import Environment, run_plan_command, run_probe_command
from autobatch.workload import Workload


class ProbeResult(Probe, frozen=True, kw_only=True):
    """A probe, with the device that it ran on."""

    device: DeviceRecord

    @property
    def probe(self) -> Probe:
        """The probe itself, under the name that it has in the JSON."""
        return self

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from autobatch.report.notebook import probe_html

        return probe_html(self, self.device)


class PlanResult(Plan, frozen=True, kw_only=True):
    """A plan, with the device and the probe that it rests on."""

    device: DeviceRecord
    probe: Probe

    @property
    def plan(self) -> Plan:
        """The plan itself, under the name that it has in the JSON."""
        return self

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from autobatch.report.notebook import plan_html

        return plan_html(self, self.device, self.probe)


def probe(workload: Workload | str | None = None, **options: Any) -> ProbeResult:
    """Find the largest micro-batch that fits.

    Args:
        workload: what to train, or a reference to it; without it, the embedded demo.
        options: as of ``autobatch probe``, under the same names, as text or plain values.

    Raises:
        InputError: an option, the device or the workload cannot be.
        DoesNotFitError: not even a micro-batch of 1 fits.
    """
    result = run_probe_command(workload, options_from(ProbeOptions, options), Environment())
    assert result.probe is not None
    return ProbeResult(**_fields(result.probe), device=result.device)


def plan(workload: Workload | str | None = None, **options: Any) -> PlanResult:
    """Probe, then plan the batch; train in your own loop.

    Args:
        workload: what to train, or a reference to it; without it, the embedded demo.
        options: as of ``autobatch plan``; ``target_batch`` is needed.

    Raises:
        InputError: an option, the device or the workload cannot be.
        DoesNotFitError: not even a micro-batch of 1 fits.
    """
    result = run_plan_command(workload, options_from(PlanOptions, options), Environment())
    assert result.plan is not None
    assert result.probe is not None
    return PlanResult(**_fields(result.plan), device=result.device, probe=result.probe)


def estimate(workload: Workload | str | None = None, **options: Any) -> Estimates:
    """Predict what fits on hardware that need not be here; touches no card.

    Args:
        workload: what to train, or a reference to it; without it, the embedded demo.
        options: as of ``autobatch estimate``; ``profile`` takes a list of names or files.

    Raises:
        InputError: an option, a profile or the workload cannot be.
        Unpredictable: the step cannot be traced; says why.
        DoesNotFitError: not even a micro-batch of 1 fits on any of the cards.
    """
    return run_estimate(workload, options_from(EstimateOptions, options), os.environ)


def tune(workload: Workload | str | None = None, **options: Any) -> Result:
    """Probe, plan, and measure what is left to choose.

    Args:
        workload: what to train, or a reference to it; without it, the embedded demo.
        options: as of ``autobatch tune``; ``target_batch`` is needed.

    Raises:
        InputError: an option, the device, the storage or the workload cannot be.
        DoesNotFitError: not even a micro-batch of 1 fits.
    """
    return run_tune_command(workload, options_from(TuneOptions, options), Environment())


def fit(workload: Workload | str | None = None, **options: Any) -> Result:
    """All of it: probe, plan, tune, train, validate and report.

    Args:
        workload: what to train, or a reference to it; without it, the embedded demo.
        options: as of ``autobatch fit``; ``target_batch`` is needed.

    Returns:
        The records of every part, and the trained ``model``.

    Raises:
        InputError: an option, the device, the storage or the workload cannot be.
        DoesNotFitError: not even a micro-batch of 1 fits.
        AutobatchError: see `autobatch.training.run.train`.
    """
    return run_fit_command(workload, options_from(FitOptions, options), Environment())


def _fields(record: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}
