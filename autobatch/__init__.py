"""autobatch: the largest micro-batch that fits, and the batch you asked for, exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from autobatch.errors import AutobatchError, DoesNotFitError, InputError
    from autobatch.integrations.windows import windows
    from autobatch.pipeline import estimate, fit, plan, probe, tune
    from autobatch.records import Plan, Probe
    from autobatch.results import Result
    from autobatch.workload import Loss, WholeBatchLoss, Workload

_HOMES = {
    "AutobatchError": "errors",
    "DoesNotFitError": "errors",
    "InputError": "errors",
    "Loss": "workload",
    "Plan": "records",
    "Probe": "records",
    "Result": "results",
    "WholeBatchLoss": "workload",
    "Workload": "workload",
    "estimate": "pipeline",
    "fit": "pipeline",
    "plan": "pipeline",
    "probe": "pipeline",
    "tune": "pipeline",
    "windows": "integrations.windows",
}

__all__ = [
    "AutobatchError",
    "DoesNotFitError",
    "InputError",
    "Loss",
    "Plan",
    "Probe",
    "Result",
    "WholeBatchLoss",
    "Workload",
    "__version__",
    "estimate",
    "fit",
    "plan",
    "probe",
    "tune",
    "windows",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used (PEP 562): ``autobatch --help`` must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'autobatch' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"autobatch.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
