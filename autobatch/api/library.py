"""Library calls: probe, plan, estimate, tune and fit.

Each takes the options of the command of the same name as keywords, as text or as plain values.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Unpack

import msgspec

from autobatch.api.context import RunContext
from autobatch.api.listeners import ShowProgress, listening
from autobatch.api.pipeline import run, run_estimate
from autobatch.api.ranks import joined_ranks
from autobatch.core.check_options import options_from
from autobatch.core.keywords import (
    EstimateKeywords,
    FitKeywords,
    PlanKeywords,
    ProbeKeywords,
    TuneKeywords,
)
from autobatch.report.result import Estimates, PlanResult, ProbeResult, Result
from autobatch.training.metrics import Sink
from autobatch.workload.contract import Workload


def probe(
    workload: Workload | str | None = None,
    *,
    progress: ShowProgress = "auto",
    **options: Unpack[ProbeKeywords],
) -> ProbeResult:
    """Find the largest micro-batch that fits.

    Args:
        workload: what to train, or a reference to it; None for the embedded demo.
        progress: ``auto`` to show it in terminals and notebooks, true, false, or a listener. Remarks also go
            to ``logging.getLogger("autobatch")``, as warnings if nothing else shows them.
        options: those of ``autobatch probe``, under the same names, as text or plain values.

    Raises:
        InputError: an option, the device or the workload is invalid.
        DoesNotFitError: not even a micro-batch of 1 fits.
    """
    checked = options_from("probe", dict(options))
    with listening(progress) as listener, joined_ranks(os.environ) as ranks:
        result = run(workload, checked, RunContext(progress=listener, ranks=ranks))
    assert result.probe is not None
    return ProbeResult(**_fields(result.probe), device=result.device)


def plan(
    workload: Workload | str | None = None,
    *,
    target_batch: int,
    progress: ShowProgress = "auto",
    **options: Unpack[PlanKeywords],
) -> PlanResult:
    """Probe, then plan the batch, to train in your own loop.

    Under torchrun all ranks call it, unless ``world_size`` is given: then this process plans alone.

    Such loops keep a micro-batch in a variable until the next one is there, so this counts on it;
    ``own_loop=False`` counts on a loop that frees it after the forward pass.

    Args:
        workload: what to train, or a reference to it; None for the embedded demo.
        target_batch: samples per optimizer step, exactly.
        progress: ``auto`` to show it in terminals and notebooks, true, false, or a listener. Remarks also go
            to ``logging.getLogger("autobatch")``, as warnings if nothing else shows them.
        options: those of ``autobatch plan``.

    Raises:
        InputError: an option, the device or the workload is invalid.
        DoesNotFitError: not even a micro-batch of 1 fits.
    """
    checked = options_from("plan", {"own_loop": True, "target_batch": target_batch, **options})
    environ = os.environ if checked.batch.world_size is None and "RANK" in os.environ else {}
    with listening(progress) as listener, joined_ranks(environ) as ranks:
        result = run(workload, checked, RunContext(progress=listener, ranks=ranks))
    assert result.plan is not None
    assert result.probe is not None
    return PlanResult(**_fields(result.plan), device=result.device, probe=result.probe)


def estimate(
    workload: Workload | str | None = None,
    *,
    target_batch: int | None = None,
    **options: Unpack[EstimateKeywords],
) -> Estimates:
    """Predict what fits on hardware that need not be here. No GPU is touched.

    Args:
        workload: what to train, or a reference to it; None for the embedded demo.
        target_batch: samples per optimizer step to plan for; None for no plan.
        options: those of ``autobatch estimate``; ``profile`` takes a list of names or files.

    Raises:
        InputError: an option, a profile or the workload is invalid.
        Unpredictable: the step cannot be traced; the message says why.
        DoesNotFitError: not even a micro-batch of 1 fits on any of the GPUs.
    """
    checked = options_from("estimate", {"target_batch": target_batch, **options})
    return run_estimate(workload, checked, os.environ)


def tune(
    workload: Workload | str | None = None,
    *,
    target_batch: int,
    progress: ShowProgress = "auto",
    **options: Unpack[TuneKeywords],
) -> Result:
    """Probe, plan, and measure what is left to choose.

    Args:
        workload: what to train, or a reference to it; None for the embedded demo.
        target_batch: samples per optimizer step, exactly.
        progress: ``auto`` to show it in terminals and notebooks, true, false, or a listener. Remarks also go
            to ``logging.getLogger("autobatch")``, as warnings if nothing else shows them.
        options: those of ``autobatch tune``.

    Raises:
        InputError: an option, the device, the storage or the workload is invalid.
        DoesNotFitError: not even a micro-batch of 1 fits.
    """
    checked = options_from("tune", {"target_batch": target_batch, **options})
    with listening(progress) as listener, joined_ranks(os.environ) as ranks:
        return run(workload, checked, RunContext(progress=listener, ranks=ranks))


def fit(
    workload: Workload | str | None = None,
    *,
    target_batch: int,
    progress: ShowProgress = "auto",
    sinks: Sequence[Sink] = (),
    **options: Unpack[FitKeywords],
) -> Result:
    """Probe, plan, tune, train, validate and report.

    Args:
        workload: what to train, or a reference to it; None for the embedded demo.
        target_batch: samples per optimizer step, exactly.
        progress: ``auto`` to show it in terminals and notebooks, true, false, or a listener. Remarks also go
            to ``logging.getLogger("autobatch")``, as warnings if nothing else shows them.
        sinks: receive the records of the training besides ``metrics.jsonl`` (see ``examples/sinks.py``).
        options: those of ``autobatch fit``.

    Returns:
        The records of every part, and the trained ``model``.

    Raises:
        InputError: an option, the device, the storage or the workload is invalid.
        DoesNotFitError: not even a micro-batch of 1 fits.
        AutobatchError: see `autobatch.training.run.train`.
    """
    checked = options_from("fit", {"target_batch": target_batch, **options})
    with listening(progress) as listener, joined_ranks(os.environ) as ranks:
        return run(workload, checked, RunContext(progress=listener, sinks=tuple(sinks), ranks=ranks))


def _fields(record: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}
