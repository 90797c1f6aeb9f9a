"""State that the forward pass of a model writes, which accumulation writes once per micro-batch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from autobatch.setup.attempt import TrainSetup
from autobatch.step.restore import temporary_weights
from autobatch.step.train_state import precision_context
from autobatch.workload.contract import WholeBatchLoss
from autobatch.workload.data import load_micro_batch
from autobatch.workload.nested import to_device
from autobatch.workload.rng import preserved_random_state

NAMED = 4
"""Names that a note lists of each kind."""


def forward_write_notes(setup: TrainSetup, micro_batches: int) -> list[str]:
    """Return a note that names what the forward pass writes besides BatchNorm; empty if nothing, or unknown.

    Args:
        setup: the workload and its model, which runs on temporary weights here.
        micro_batches: of a step.
    """
    has_any = bool(_buffers(setup.model)) or any(not p.requires_grad for p in setup.model.parameters())
    if micro_batches < 2 or not has_any or isinstance(setup.workload.loss, WholeBatchLoss):
        return []
    try:
        buffers, frozen = written_in_forward(setup)
    except Exception:  # what fails here fails in training too, and is reported there
        return []
    parts = [
        f"the {what}{'s' * (len(names) > 1)} {', '.join(names[:NAMED])}"
        + (f" and {len(names) - NAMED} more" * (len(names) > NAMED))
        for what, names in (("buffer", buffers), ("frozen parameter", frozen))
        if names
    ]
    if not parts:
        return []
    return [
        f"the forward pass writes {' and '.join(parts)}: each of the {micro_batches} micro-batches of a step "
        "does, one after the other, where one pass over the whole batch would write once. Gradients are "
        "exact; what is written depends on the micro-batch"
    ]


def written_in_forward(setup: TrainSetup) -> tuple[list[str], list[str]]:
    """Return the names of the buffers, without those of BatchNorm, and of the frozen parameters that change.

    Raises:
        Exception: whatever the workload raises on two samples.
    """
    device = setup.device.torch_device
    with preserved_random_state(), setup.device.training(), temporary_weights(setup.model, device) as model:
        model.train()
        frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        before = {name: value.detach().clone() for name, value in {**_buffers(model), **frozen}.items()}
        batch = to_device(load_micro_batch(setup.workload, [0, 1 % len(setup.workload.train_data)]), device)  # type: ignore[arg-type]
        with precision_context(device, setup.precision), torch.no_grad():
            setup.workload.loss(model, batch)
        buffers = [name for name, value in _buffers(model).items() if _differs(value, before.get(name))]
        return buffers, [name for name, value in frozen.items() if _differs(value, before[name])]


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of a model by name, without those of BatchNorm."""
    return {
        f"{prefix}.{name}".lstrip("."): buffer
        for prefix, module in model.named_modules()
        if not isinstance(module, _BatchNorm)
        for name, buffer in module._buffers.items()
        if buffer is not None
    }


def _differs(now: torch.Tensor, before: torch.Tensor | None) -> bool:
    if before is None or now.shape != before.shape:
        return True
    return not torch.equal(now, before)
