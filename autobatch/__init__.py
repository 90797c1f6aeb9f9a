"""autobatch: the largest micro-batch that fits, and the batch you asked for, exactly."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autobatch.core import __version__ as __version__

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

__all__ = ["__version__", *(name for names in _MODULES.values() for name in names)]  # noqa: PLE0604

if TYPE_CHECKING:  # which refuses other names
    from autobatch.api.library import estimate as estimate
    from autobatch.api.library import fit as fit
    from autobatch.api.library import plan as plan
    from autobatch.api.library import probe as probe
    from autobatch.api.library import tune as tune
    from autobatch.core.errors import AutobatchError as AutobatchError
    from autobatch.core.errors import CheckpointError as CheckpointError
    from autobatch.core.errors import DoesNotFitError as DoesNotFitError
    from autobatch.core.errors import InputError as InputError
    from autobatch.core.errors import Interrupted as Interrupted
    from autobatch.core.errors import NonFiniteError as NonFiniteError
    from autobatch.core.errors import RestartSmallerError as RestartSmallerError
    from autobatch.core.progress import Progress as Progress
    from autobatch.core.records import Plan as Plan
    from autobatch.core.records import Probe as Probe
    from autobatch.core.records import StepRecord as StepRecord
    from autobatch.core.records import Training as Training
    from autobatch.integrations.own_loop import batches as batches
    from autobatch.report.result import Estimates as Estimates
    from autobatch.report.result import FitResult as FitResult
    from autobatch.report.result import PlanResult as PlanResult
    from autobatch.report.result import ProbeResult as ProbeResult
    from autobatch.report.result import Result as Result
    from autobatch.report.result import TuneResult as TuneResult
    from autobatch.training.metrics import Sink as Sink
    from autobatch.workload.contract import Loss as Loss
    from autobatch.workload.contract import WholeBatchLoss as WholeBatchLoss
    from autobatch.workload.contract import Workload as Workload
else:

    def __getattr__(name: str) -> Any:
        """Import a public name at first use (PEP 562): ``autobatch --help`` must not wait for torch."""
        for module, names in _MODULES.items():
            if name in names:
                import random  # not for the help

                state = random.getstate()
                try:
                    return getattr(import_module(f"autobatch.{module}"), name)
                finally:
                    random.setstate(state)  # rich draws from it when it is imported
        raise AttributeError(f"module 'autobatch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
