"""Memory that runs out in training: the batch is rolled back, and errors name the remedies."""

from __future__ import annotations

from autobatch.core.errors import AutobatchError, DoesNotFitError, RestartSmallerError
from autobatch.core.units import format_bytes
from autobatch.device.base import Device
from autobatch.device.host import host_memory
from autobatch.distributed.engine import OutOfMemory
from autobatch.step.apply_knobs import free_graphs
from autobatch.step.train_state import TrainState
from autobatch.workload.contract import WholeBatchLoss
from autobatch.workload.rng import RandomState, restore_random_state


def undo_batch(train_state: TrainState, device: Device, random_state: RandomState, *, is_fatal: bool) -> bool:
    """Return to the start of a batch, outside of any ``except`` block.

    Args:
        train_state: its gradients are dropped, and its buffers restored.
        device: frees its cache.
        random_state: of all generators at the start of the batch.
        is_fatal: whether the device may no longer answer.

    Returns:
        False if a large buffer has changed, or if a device after a fatal error no longer answers.
    """
    train_state.gradients.clear()
    try:
        if train_state.gradients.are_overwritten:
            # The graphs of the micro-batches that ran out of memory hold theirs.
            free_graphs()
        device.release()
        # A lost device fails here for certain: freeing its cache may not show it.
        device.synchronize()
        is_restored = train_state.buffers.restore()
        restore_random_state(random_state)
    except Exception:
        if not is_fatal:
            raise
        return False
    return is_restored


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
