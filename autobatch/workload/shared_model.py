"""Detection of a model that exists beside the function that should build it."""

from __future__ import annotations

import inspect

from torch import nn

from autobatch.workload.contract import Workload


def shared_model_notes(workload: Workload, model: nn.Module) -> list[str]:
    """Return a note if the workload's function hands out a model that exists beside it, else nothing."""
    try:
        names = inspect.getclosurevars(inspect.unwrap(workload.model))
    except TypeError:  # a class, or a partial function
        return []
    for name, value in {**names.globals, **names.nonlocals}.items():
        held = {name: value} | {f"{name}.{key}": one for key, one in getattr(value, "__dict__", {}).items()}
        for path, one in held.items():
            if one is model:
                return [
                    f"Workload(model=…) hands out a model that exists already ({path}): the run trains it in "
                    "place, and the next run starts from its weights. Build the model in the function for a "
                    "fresh start"
                ]
    return []
