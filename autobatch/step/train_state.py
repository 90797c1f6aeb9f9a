"""A model with all that an optimizer step of it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autobatch.core.errors import InputError
from autobatch.core.records import Precision
from autobatch.step.apply_knobs import apply_forward, apply_implementation, apply_layout
from autobatch.step.ema import WeightAverage
from autobatch.step.gradients import Gradients, Optimizers
from autobatch.step.restore import BufferSnapshot
from autobatch.workload.contract import Collated, Loss, WholeBatchLoss, Workload
from autobatch.workload.user_code import user_code

_DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(kw_only=True)
class TrainState:
    """A model with all that an optimizer step of it needs."""

    model: nn.Module
    loss: Callable[[nn.Module, Collated], Tensor | Loss]
    optimizers: Optimizers
    parameters: list[nn.Parameter]
    """What the optimizers train, each once."""
    device: torch.device
    precision: Precision
    scaler: torch.amp.GradScaler | None
    """Only for fp16: gradients in bf16 and fp32 need no loss scale."""
    max_grad_norm: float | None
    gradients: Gradients
    buffers: BufferSnapshot
    """What the buffers were before the window that runs."""
    items_per_sample: float | None = None
    """The first count above 0 that a `Loss` gave, a sample; ``None`` until then. Fixed for the whole run."""
    average: WeightAverage | None = None
    """Of the weights; moves with every step that is taken."""
    stepping: bool = False
    """An optimizer has begun to move weights: what fails now cannot be run again in place."""


def build_train_state(
    workload: Workload,
    model: nn.Module,
    device: torch.device,
    *,
    precision: Precision,
    learning_rate: float,
    max_grad_norm: float | None = None,
    ema: float | None = None,
    knobs: Mapping[str, object] | None = None,
) -> TrainState:
    """Put a model with its optimizer and its loss scale together; the model is on ``device`` already.

    What the tuner chose, ``knobs``, is applied here; see `autobatch.step.apply_knobs`. With ``ema``, the
    decay of an average of the weights, that average begins here.

    Raises:
        InputError: the workload's optimizer is none, or trains nothing that can be trained in this precision.
    """
    knobs = knobs or {}
    apply_layout(model, knobs)
    with user_code("optimizer"):
        made = workload.optimizer(model.parameters(), learning_rate)
    optimizers = tuple(made) if isinstance(made, list | tuple) else (made,)
    for one in optimizers:
        if not isinstance(one, torch.optim.Optimizer):
            raise InputError(
                f"Workload(optimizer=…) returned a {type(one).__name__}, not a torch.optim.Optimizer"
            )
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    apply_implementation(optimizers, knobs)
    parameters = list({id(p): p for group in groups for p in group["params"]}.values())
    if not any(parameter.requires_grad for parameter in parameters):
        raise InputError("the workload's optimizer was given no parameter that requires a gradient")
    if precision == "fp16" and any(parameter.dtype == torch.float16 for parameter in parameters):
        raise InputError(
            "the model's parameters are fp16, and --precision fp16 scales the loss for parameters in fp32: "
            "keep them in fp32, or choose --precision fp32 to run them as they are"
        )
    return TrainState(
        model=model,
        loss=apply_forward(workload.loss, model, knobs),
        optimizers=optimizers,
        parameters=parameters,
        device=device,
        precision=precision,
        scaler=torch.amp.GradScaler(device.type) if precision == "fp16" else None,
        max_grad_norm=max_grad_norm,
        gradients=Gradients(model, optimizers),
        # A window that is gone through twice goes through the same buffers twice.
        buffers=BufferSnapshot(model, copy_all=isinstance(workload.loss, WholeBatchLoss)),
        average=None if ema is None else WeightAverage(parameters, ema),
    )


def precision_context(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """Autocast for the forward of a micro-batch; nothing for fp32."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=_DTYPES[precision])
