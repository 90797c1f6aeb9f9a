"""The way back to the start of a batch that ran out of memory."""

from __future__ import annotations

from autobatch.device.base import Device
from autobatch.step.apply_knobs import free_graphs
from autobatch.step.train_state import TrainState
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
