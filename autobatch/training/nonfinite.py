"""The error of a step that is not finite, and the search for the sample that makes it so."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from autobatch.core.errors import NonFiniteError
from autobatch.distributed.ranks import Ranks
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
    ranks: Ranks,
    step: str,
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
        step: the step in words.
        loss: of the batch.
        reason: why the step is not skipped, in words that follow the finding; empty for none.
    """
    what = "gradient" if math.isfinite(loss) else f"loss ({loss})"
    own = [index for part in micro_batches for index in part]
    culprit = find_nonfinite_sample(workload, train_state, micro_batches)
    found = ranks.gather((culprit, own[: MAX_NAMED_SAMPLES + 1], len(own)))
    culprit = next((one for one, _, _ in found if one is not None), None)
    first = [index for _, some, _ in found for index in some][:MAX_NAMED_SAMPLES]
    more = sum(count for _, _, count in found) - len(first)
    named = f"samples {first}{f' and {more} more' if more else ''}"
    if culprit is not None:
        kind = "row" if isinstance(train_state.loss, WholeBatchLoss) else "loss"
        named = f"sample {culprit} alone gives a non-finite {kind} ({named})"
    scaler = train_state.scaler
    at = "" if scaler is None else f" at a loss scale of {scaler.get_scale():.1e}"
    return NonFiniteError(
        f"the {what} of {step} is not finite{at}{reason}, so the step was not applied: "
        f"{named}. Check these samples, the learning rate and the precision"
    )


def find_nonfinite_sample(
    workload: Workload, train_state: TrainState, micro_batches: Sequence[list[int]]
) -> int | None:
    """Return the sample whose own loss (or row, for a `WholeBatchLoss`) is not finite; None if none is found.

    Halves the first non-finite micro-batch until one sample is left. It runs forward passes only, and changes
    nothing that the run depends on.

    Args:
        workload: has the data and the loss.
        train_state: the model, in the state in which the step failed.
        micro_batches: the samples of each micro-batch of this rank.
    """
    if train_state.shared is not None:
        # The ranks would have to run the same number of passes.
        return None
    try:
        with preserved_random_state(), torch.no_grad():
            for micro_batch in micro_batches:
                part = micro_batch
                if _is_finite(workload, train_state, part):
                    continue
                while len(part) > 1:
                    half = part[: len(part) // 2]
                    part = part[len(half) :] if _is_finite(workload, train_state, half) else half
                return None if _is_finite(workload, train_state, part) else part[0]
    except Exception:  # a failed diagnosis must not hide the error that it is about
        return None
    return None


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
