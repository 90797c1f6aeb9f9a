"""Errors that end a run out of memory, with the remedies in words."""

from __future__ import annotations

from autobatch.core.errors import AutobatchError, DoesNotFitError, RestartSmallerError
from autobatch.core.units import format_bytes
from autobatch.device.host import host_memory
from autobatch.distributed.engine import OutOfMemory
from autobatch.step.train_state import TrainState
from autobatch.workload.contract import WholeBatchLoss


def error_before_step(train_state: TrainState, step: int, oom: OutOfMemory) -> AutobatchError | None:
    """Return the error that ends a run out of memory; None if the batch can run again in smaller parts.

    Args:
        train_state: tells which remedies apply.
        step: the number of the step, from 1.
        oom: the error.
    """
    if oom.size == 1 or oom.is_in_loss:
        remedies = ["a larger --memory-budget"]
        if isinstance(train_state.loss, WholeBatchLoss):
            remedies.append("a smaller --target-batch")
        if train_state.precision == "fp32":
            remedies.append("--precision bf16")
        where = "in training at a micro-batch of 1"
        if oom.is_in_loss:
            where = f"in the loss over all {oom.size} samples of a batch, whatever the micro-batch"
        else:
            remedies.append("activation checkpointing")
        return DoesNotFitError(
            f"out of memory {where}: {oom.message.rstrip('.')}; what would help: {', '.join(remedies)}"
        )
    where = f"out of memory in step {step} at a micro-batch of {oom.size}"
    if oom.is_fatal:
        return RestartSmallerError(
            f"{where}, in the driver, after which this process cannot continue: {oom.message}"
        )
    if not oom.is_intact:
        return RestartSmallerError(
            f"{where}: {oom.message.rstrip('.')}. The batch cannot run again, because the forward "
            "pass changed a large buffer of the model"
        )
    return None


def error_in_step(train_state: TrainState, step: int, micro_batch: int, message: str) -> AutobatchError:
    """Return the error of a run that is out of memory inside the optimizer step.

    A smaller micro-batch may leave more room for the step, so the run is restarted in smaller ones down to 1.
    """
    where = f"out of memory in step {step} at a micro-batch of {micro_batch}"
    if micro_batch > 1 and train_state.shared is not None:
        return RestartSmallerError(f"{where}, for which other ranks of a shared model wait: {message}")
    where += ", inside the optimizer step"
    if micro_batch > 1:
        return RestartSmallerError(f"{where}, which may have moved part of the weights: {message}")
    average = "" if train_state.average is None else ", no --ema"
    return DoesNotFitError(
        f"{where}: {message.rstrip('.')}; what would help: a larger --memory-budget, a fused optimizer "
        f"(fused=True), an optimizer with less state{average}"
    )


def available_host_memory() -> str:
    """Return the host memory that is available, in words; ``unknown`` if it cannot be read now."""
    try:
        return format_bytes(host_memory().available_bytes)
    except MemoryError:
        return format_bytes(None)
