"""Errors that end a run in a step: memory that runs out for good, and values that are not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from autobatch.core.errors import AutobatchError, DoesNotFitError, NonFiniteError, RestartSmallerError
from autobatch.distributed.engine import OutOfMemory
from autobatch.distributed.ranks import Ranks
from autobatch.step.train_state import TrainState, precision_context
from autobatch.workload.contract import Loss, WholeBatchLoss, Workload
from autobatch.workload.data import load_micro_batch
from autobatch.workload.nested import tensors_of, to_device
from autobatch.workload.rng import preserved_random_state

MAX_NAMED_SAMPLES = 8
"""Samples that a message names."""


def out_of_memory_error(
    train_state: TrainState, step: int, oom: OutOfMemory, *, in_step: bool = False
) -> AutobatchError | None:
    """Return the error that ends a run out of memory; None if the batch can run again in smaller parts.

    A restart in smaller micro-batches, down to 1, may leave more room for the optimizer step.

    Args:
        train_state: tells which suggestions apply.
        step: the number of the step, from 1.
        oom: the error.
        in_step: whether the optimizer step had begun, or another rank may wait for this one.
    """
    where, why = f"out of memory in step {step} at a micro-batch of {oom.size}", ""
    message = oom.message.rstrip(".")
    if oom.size == 1 or oom.is_in_loss:
        suggestions = {"a larger --memory-budget": True}
        if in_step:
            where += ", inside the optimizer step"
            suggestions |= {"a fused optimizer (fused=True)": True, "an optimizer with less state": True}
            suggestions["no --ema"] = train_state.average is not None
        else:
            suggestions["a smaller --target-batch"] = isinstance(train_state.loss, WholeBatchLoss)
            suggestions["--precision bf16"] = train_state.precision == "fp32"
            suggestions["activation checkpointing"] = not oom.is_in_loss
        if oom.is_in_loss:
            where = f"out of memory in the loss over all {oom.size} samples of a batch, at any micro-batch"
        remedies = ", ".join(remedy for remedy, applies in suggestions.items() if applies)
        return DoesNotFitError(f"{where}: {message}; what would help: {remedies}")
    if in_step and train_state.shared is not None:
        why = "for which the other ranks of the sharded model wait"
    elif in_step:
        why = "inside the optimizer step, which may have moved part of the weights"
    elif oom.is_fatal:
        why = "in the driver, after which this process cannot continue"
    elif not oom.is_intact:
        why = "where the batch cannot run again, because the forward pass changed a large buffer of the model"
    return RestartSmallerError(f"{where}, {why}: {message}") if why else None


def nonfinite_error(
    workload: Workload,
    train_state: TrainState,
    micro_batches: Sequence[list[int]],
    *,
    ranks: Ranks,
    step: int,
    loss: float,
    reason: str,
) -> NonFiniteError:
    """Return the error of a step that was not applied because its loss or gradient is not finite.

    All ranks call it, and get the same error. Otherwise the rank that finds nothing would speak first, and
    name its own samples.

    Args:
        workload: has the data and the loss.
        train_state: the model, in the state in which the step failed.
        micro_batches: the samples of each micro-batch of this rank.
        ranks: the ranks.
        step: the number of the step, from 1.
        loss: of the batch.
        reason: why the step is not skipped, in words that follow the finding; empty for none.
    """
    what = "gradient" if math.isfinite(loss) else f"loss ({loss})"
    own = [index for part in micro_batches for index in part]
    culprit = find_nonfinite_sample(workload, train_state, micro_batches)
    found = ranks.gather((culprit, own[:MAX_NAMED_SAMPLES], len(own)))
    culprit = next((one for one, _, _ in found if one is not None), None)
    first = [index for _, some, _ in found for index in some][:MAX_NAMED_SAMPLES]
    more = sum(count for _, _, count in found) - len(first)
    named = f"samples {first}{f' and {more} more' if more else ''}"
    if culprit is not None:
        kind = "representation" if isinstance(train_state.loss, WholeBatchLoss) else "loss"
        named = f"sample {culprit} alone gives a non-finite {kind} ({named})"
    scaler = train_state.scaler
    at = "" if scaler is None else f" at a loss scale of {scaler.get_scale():.1e}"
    return NonFiniteError(
        f"the {what} of step {step} is not finite{at}{reason}, so the step was not applied: "
        f"{named}. Check these samples, the learning rate and the precision"
    )


def find_nonfinite_sample(
    workload: Workload, train_state: TrainState, micro_batches: Sequence[list[int]]
) -> int | None:
    """Return the sample whose own loss is not finite, or its representation for a `WholeBatchLoss`.

    Halves the first non-finite micro-batch until one sample is left. It runs forward passes only, and changes
    nothing that the run depends on.

    Returns:
        None if none is found, or if the model is sharded, where all ranks would have to run the same passes.
    """
    if train_state.shared is not None:
        return None
    try:
        with preserved_random_state(), torch.no_grad():
            for part in micro_batches:
                if _is_finite(workload, train_state, part):
                    continue
                left = part
                while len(left) > 1:
                    half = left[: len(left) // 2]
                    left = left[len(half) :] if _is_finite(workload, train_state, half) else half
                return None if _is_finite(workload, train_state, left) else left[0]
    except Exception:  # a failed diagnosis must not hide the error that it is about
        return None
    return None


def _is_finite(workload: Workload, train_state: TrainState, ids: Sequence[int]) -> bool:
    train_state.buffers.take()
    try:
        batch = to_device(load_micro_batch(workload, ids), train_state.device)
        with precision_context(train_state.device, train_state.precision):
            if isinstance(train_state.loss, WholeBatchLoss):
                found = tensors_of(train_state.loss.represent(train_state.model, batch))
                return all(bool(one.isfinite().all()) for one in found)
            loss = train_state.loss(train_state.model, batch)
        return math.isfinite(float(loss.total if isinstance(loss, Loss) else loss))
    finally:
        train_state.buffers.restore()
