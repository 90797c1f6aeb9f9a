"""The error of a step that is not finite, and the search for the sample that makes it so."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from autobatch.core.errors import NonFiniteError
from autobatch.step.train_state import TrainState, precision_context
from autobatch.workload.contract import Loss, WholeBatchLoss, Workload
from autobatch.workload.data import load_micro_batch
from autobatch.workload.nested import tensors_of, to_device
from autobatch.workload.rng import preserved_random_state

MAX_NAMED_SAMPLES = 8
"""Samples that a message names."""


def nonfinite_error(
    workload: Workload,
    train_state: TrainState,
    micro_batches: Sequence[list[int]],
    *,
    step: str,
    loss: float,
    reason: str,
) -> NonFiniteError:
    """Return the error of a step that was not applied because its loss or gradient is not finite.

    Args:
        workload: has the data and the loss.
        train_state: the model, in the state in which the step failed.
        micro_batches: the samples of each micro-batch of the batch.
        step: the step in words.
        loss: of the batch.
        reason: why the step is not skipped, in words that follow the finding; empty for none.
    """
    what = "gradient" if math.isfinite(loss) else f"loss ({loss})"
    scaler = train_state.scaler
    at = "" if scaler is None else f" at a loss scale of {scaler.get_scale():.1e}"
    return NonFiniteError(
        f"the {what} of {step} is not finite{at}{reason}, so the step was not applied: "
        f"{find_nonfinite_sample(workload, train_state, micro_batches)}. "
        "Check these samples, the learning rate and the precision"
    )


def find_nonfinite_sample(
    workload: Workload, train_state: TrainState, micro_batches: Sequence[list[int]]
) -> str:
    """Name the sample whose own loss (or row, for a `WholeBatchLoss`) is not finite, else all samples.

    Halves the first non-finite micro-batch until one sample is left. It runs forward passes only, and changes
    nothing that the run depends on.

    Args:
        workload: has the data and the loss.
        train_state: the model, in the state in which the step failed.
        micro_batches: the samples of each micro-batch of the batch.
    """
    ids = [index for part in micro_batches for index in part]
    rest = f" and {len(ids) - MAX_NAMED_SAMPLES} more" if len(ids) > MAX_NAMED_SAMPLES else ""
    named = f"samples {list(ids[:MAX_NAMED_SAMPLES])}{rest}"
    if train_state.shared is not None:
        # The ranks would have to run the same number of passes.
        return named
    try:
        with preserved_random_state(), torch.no_grad():
            for micro_batch in micro_batches:
                part = micro_batch
                if _is_finite(workload, train_state, part):
                    continue
                while len(part) > 1:
                    half = part[: len(part) // 2]
                    part = part[len(half) :] if _is_finite(workload, train_state, half) else half
                if not _is_finite(workload, train_state, part):
                    what = "row" if isinstance(train_state.loss, WholeBatchLoss) else "loss"
                    return f"sample {part[0]} alone gives a non-finite {what} ({named})"
                break
    except Exception:  # a failed diagnosis must not hide the error that it is about
        return named
    return named


def _is_finite(workload: Workload, train_state: TrainState, ids: Sequence[int]) -> bool:
    train_state.buffers.take()
    try:
        batch = to_device(load_micro_batch(workload, ids), train_state.device)
        with precision_context(train_state.device, train_state.precision):
            if isinstance(train_state.loss, WholeBatchLoss):
                rows = tensors_of(train_state.loss.represent(train_state.model, batch))
                return all(bool(row.isfinite().all()) for row in rows)
            loss = train_state.loss(train_state.model, batch)
        return math.isfinite(float(loss.total if isinstance(loss, Loss) else loss))
    finally:
        train_state.buffers.restore()
