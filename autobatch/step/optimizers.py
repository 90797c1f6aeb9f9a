"""The optimizers of a workload: built from the model, and checked."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from autobatch.core.errors import InputError
from autobatch.step.gradients import Optimizers
from autobatch.workload.contract import Workload, kind_of
from autobatch.workload.user_code import user_code


def build_optimizers(workload: Workload, model: nn.Module, learning_rate: float) -> Optimizers:
    """Build the optimizers of a model, ready to train.

    Raises:
        InputError: ``Workload(optimizer=…)`` returns no optimizer, one whose step runs the loss again, or one
            with other weights for its evaluation.
    """
    with user_code("optimizer", workload.optimizer):
        optimizers = _call(workload, model, learning_rate)
        for optimizer in optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise InputError(
                    "Workload(optimizer=…) must return a torch.optim.Optimizer or a list of them, found "
                    f"{kind_of(optimizer)}"
                )
            closure = inspect.signature(optimizer.step).parameters.get("closure")
            needs_closure = closure is not None and closure.default is inspect.Parameter.empty
            if needs_closure or hasattr(optimizer, "first_step"):  # as LBFGS, or as SAM
                raise InputError(
                    f"{type(optimizer).__name__} runs the loss of the whole batch again within its step, and "
                    "a batch in micro-batches has no such loss: use an optimizer whose step() takes no "
                    "closure, for example AdamW or Muon, or two autobatch.batches in your own loop "
                    "(docs/loops.md)"
                )
            if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
                raise InputError(
                    f"{type(optimizer).__name__} switches its weights by train() and eval(), which autobatch "
                    "does not call: plan with the optimizer that it is made of, for example AdamW, and use "
                    "autobatch.batches in your own loop (docs/loops.md)"
                )
    return optimizers


def stand_in_optimizers(workload: Workload) -> list[torch.optim.Optimizer]:
    """Build the workload's optimizers for a stand-in parameter; none if they need the model's own."""
    stand_in = nn.ParameterList([nn.Parameter(torch.zeros(1, device="cpu"))])
    try:
        made = _call(workload, stand_in, workload.learning_rate)
    except Exception:
        return []
    return [built for built in made if isinstance(built, torch.optim.Optimizer)]


def _call(workload: Workload, model: nn.Module, learning_rate: float) -> tuple[Any, ...]:
    """Call the optimizer function with what the name of its first argument asks for.

    That is the model, pairs of name and parameter, or the parameters for any other name.
    """
    try:
        name = next(iter(inspect.signature(workload.optimizer).parameters), "")
    except (TypeError, ValueError):  # a class or a built-in without a signature
        name = ""
    given: Any = model.parameters()
    if name in ("model", "module"):
        given = model
    elif name in ("named_parameters", "named_params"):
        given = model.named_parameters()
    made = workload.optimizer(given, learning_rate)
    return tuple(made) if isinstance(made, list | tuple) else (made,)
