"""autobatch: the largest micro-batch that fits, and the batch you asked for, exactly."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autobatch.core.version import __version__

if TYPE_CHECKING:
    from autobatch import integrations
    from autobatch.api.library import estimate, fit, plan, probe, tune
    from autobatch.core.errors import (
        AutobatchError,
        CheckpointError,
        DoesNotFitError,
        InputError,
        Interrupted,
        NonFiniteError,
        RestartSmallerError,
    )
    from autobatch.core.progress import Progress
    from autobatch.core.records import Plan, Probe, StepRecord, Training
    from autobatch.integrations.own_loop import batches
    from autobatch.report.result import (
        Estimates,
        FitResult,
        PlanResult,
        ProbeResult,
        Result,
        TuneResult,
    )
    from autobatch.training.metrics import Sink
    from autobatch.workload.contract import Loss, WholeBatchLoss, Workload

_MODULES = {
    "api.library": ("estimate", "fit", "plan", "probe", "tune"),
    "core.errors": (
        "AutobatchError",
        "CheckpointError",
        "DoesNotFitError",
        "InputError",
        "Interrupted",
        "NonFiniteError",
        "RestartSmallerError",
    ),
    "core.progress": ("Progress",),
    "core.records": ("Plan", "Probe", "StepRecord", "Training"),
    "integrations.own_loop": ("batches",),
    "report.result": ("Estimates", "FitResult", "PlanResult", "ProbeResult", "Result", "TuneResult"),
    "training.metrics": ("Sink",),
    "workload.contract": ("Loss", "WholeBatchLoss", "Workload"),
}
"""Public names by the module that defines them."""

__all__ = [
    "AutobatchError",
    "CheckpointError",
    "DoesNotFitError",
    "Estimates",
    "FitResult",
    "InputError",
    "Interrupted",
    "Loss",
    "NonFiniteError",
    "Plan",
    "PlanResult",
    "Probe",
    "ProbeResult",
    "Progress",
    "RestartSmallerError",
    "Result",
    "Sink",
    "StepRecord",
    "Training",
    "TuneResult",
    "WholeBatchLoss",
    "Workload",
    "__version__",
    "batches",
    "estimate",
    "fit",
    "integrations",
    "plan",
    "probe",
    "tune",
]

if not TYPE_CHECKING:  # a type checker sees the imports above, and refuses other names

    def __getattr__(name: str) -> Any:
        """Import a public name at first use (PEP 562): ``autobatch --help`` must not wait for torch."""
        if name == "integrations":
            return import_module("autobatch.integrations")
        for module, names in _MODULES.items():
            if name in names:
                return getattr(import_module(f"autobatch.{module}"), name)
        raise AttributeError(f"module 'autobatch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
