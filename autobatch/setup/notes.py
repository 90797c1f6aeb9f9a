"""Notes on a setup: what the user may want to change before it is probed."""

from __future__ import annotations

from torch import nn

from autobatch.core.records.base import Precision
from autobatch.core.units import format_bytes
from autobatch.workload.contract import WholeBatchLoss, Workload


def whole_batch_notes(workload: Workload, whole_batch: int | None) -> list[str]:
    """Return a note if the loss sees a whole batch of unknown size, else nothing."""
    if whole_batch is not None or not isinstance(workload.loss, WholeBatchLoss):
        return []
    return [
        "the loss sees all samples of an optimizer step, assumed to be two micro-batches here: a larger "
        "batch takes more memory. Give --target-batch to plan, tune, fit or estimate"
    ]


def placement_notes(model: nn.Module) -> list[str]:
    """Return a note if the model was built on a GPU, where attempts hold a copy beside it."""
    parameters = [one for one in model.parameters() if one.device.type not in ("cpu", "meta")]
    if not parameters:
        return []
    held = format_bytes(sum(one.numel() * one.element_size() for one in parameters))
    return [
        f"the model was built on {parameters[0].device}, where each attempt holds a copy of its {held} "
        "beside it, so that fewer samples fit: build it on the CPU, and it is moved once"
    ]


def emulation_notes(precision: Precision, compute_capability: tuple[int, int] | None) -> list[str]:
    """Return a note if a GPU is older than the first that computes in bf16 (8.0), and emulates it."""
    if precision != "bf16" or compute_capability is None or compute_capability >= (8, 0):
        return []
    capability = ".".join(map(str, compute_capability))
    return [
        f"a GPU of compute capability {capability} emulates bf16, which is slower than fp32: --precision "
        "fp16 is fast from 7.0 on"
    ]
