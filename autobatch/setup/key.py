"""The key of an answer: everything that changes what fits, by name."""

from __future__ import annotations

import hashlib
import os

import torch
from torch import nn

from autobatch.core.records import DeviceRecord
from autobatch.device.cuda_allocator import allocator_options
from autobatch.setup.attempt import TrainSetup
from autobatch.step.optimizers import argument_of
from autobatch.workload.contract import WholeBatchLoss, Workload
from autobatch.workload.nested import tensors_of

KeyValue = str | int | None


def setup_key(setup: TrainSetup, device: DeviceRecord) -> dict[str, KeyValue]:
    """Return everything that changes what fits, by name."""
    sample = setup.worst_case.batch(2)
    loss = setup.workload.loss
    functions = [loss.represent, loss.loss] if isinstance(loss, WholeBatchLoss) else [loss]
    return {
        "workload": setup.workload.name,
        "model": _digest(
            *(
                f"{name}:{tuple(p.shape)}:{p.dtype}:{p.requires_grad}"
                for name, p in setup.model.named_parameters()
            ),
            *(f"{name}:{type(module).__qualname__}" for name, module in setup.model.named_modules()),
        ),
        "samples": _digest(*(f"{tuple(t.shape)}:{t.dtype}" for t in tensors_of(sample))),
        "loss": "+".join(map(_name_of, functions)),
        "whole_batch": setup.whole_batch,
        "optimizer": _digest(_optimizer_line(setup.workload)),
        "max_grad_norm": None if setup.max_grad_norm is None else str(setup.max_grad_norm),
        # Its memory does not depend on the decay.
        "ema": None if setup.ema is None else "on",
        **device_key(setup),
        "budget_bytes": device.budget_bytes,
        "allocator": allocator_options(os.environ) or None,
        "world_size": setup.world,
        # None as in the keys of runs that knew only whole models.
        "parallel": None if setup.layout is None else str(setup.layout),
        "keeps_batches": 1 if setup.keeps_batches else None,
    }


def device_key(setup: TrainSetup) -> dict[str, KeyValue]:
    """Return the part of the key that a bit-exact resume depends on: hardware, torch and precision."""
    device = setup.device.describe()
    return {
        "precision": setup.precision,
        # None as in the keys of runs that knew no other type.
        "gradient_dtype": None if setup.gradient_dtype == "fp32" else setup.gradient_dtype,
        "device": device.name,
        "device_kind": device.kind,
        "total_bytes": device.total_bytes,
        "torch": str(torch.__version__),
    }


def _name_of(function: object) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def _optimizer_line(workload: Workload) -> str:
    """Return the classes and the settings of the workload's optimizers as text."""
    made = stand_in_optimizers(workload)
    if not made:
        return str(getattr(workload.optimizer, "__qualname__", type(workload.optimizer).__qualname__))
    return ";".join(
        f"{type(one).__qualname__}:{sorted((key, str(value)) for key, value in one.defaults.items())}"
        for one in made
    )


def stand_in_optimizers(workload: Workload) -> list[torch.optim.Optimizer]:
    """Build the workload's optimizers for a stand-in parameter; none if they need the model's own."""
    stand_in = nn.ParameterList([nn.Parameter(torch.zeros(1, device="cpu"))])
    try:
        made = workload.optimizer(argument_of(workload, stand_in), workload.learning_rate)
    except Exception:
        return []
    several = made if isinstance(made, list | tuple) else [made]
    return [one for one in several if isinstance(one, torch.optim.Optimizer)]


def _digest(*lines: str) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
