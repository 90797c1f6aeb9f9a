"""The largest micro-batch that fits, and exactly the batch you ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autobatch.core.version import __version__

if TYPE_CHECKING:
    from autobatch.api.library import estimate, fit, plan, probe, tune
    from autobatch.core.errors import AutobatchError, DoesNotFitError, InputError
    from autobatch.core.records import Plan, Probe
    from autobatch.integrations.custom_loop import batches
    from autobatch.report.result import Result
    from autobatch.workload.contract import Loss, WholeBatchLoss, Workload

_HOMES = {
    "AutobatchError": "core.errors",
    "DoesNotFitError": "core.errors",
    "InputError": "core.errors",
    "Loss": "workload.contract",
    "Plan": "core.records",
    "Probe": "core.records",
    "Result": "report.result",
    "WholeBatchLoss": "workload.contract",
    "Workload": "workload.contract",
    "estimate": "api.library",
    "fit": "api.library",
    "plan": "api.library",
    "probe": "api.library",
    "tune": "api.library",
    "batches": "integrations.custom_loop",
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
    "batches",
    "estimate",
    "fit",
    "plan",
    "probe",
    "tune",
]


if not TYPE_CHECKING:  # a type checker must refuse names that do not exist

    def __getattr__(name: str) -> Any:
        """Import a public name on first use (PEP 562), so that ``autobatch --help`` does not import torch."""
        if name not in _HOMES:
            raise AttributeError(f"module 'autobatch' has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(f"autobatch.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
