"""Which samples of a window make its loss not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from autobatch.step.train_state import TrainState, precision_context
from autobatch.workload.contract import Loss, WholeBatchLoss, Workload
from autobatch.workload.data import load_micro_batch
from autobatch.workload.nested import tensors_of, to_device
from autobatch.workload.rng import preserved_random_state

SHOWN = 8
"""Samples that a message names."""


def find_nonfinite_sample(
    workload: Workload, train_state: TrainState, ids: Sequence[int], sizes: Sequence[int]
) -> str:
    """Name the sample whose loss (or row, of a loss over all) is not finite by itself, else the window's.

    The first bad micro-batch is halved until one sample is left; forward passes only, and nothing is
    changed that the run depends on.

    Args:
        workload: has the data and the loss.
        train_state: the model, in the state in which the window failed.
        ids: samples of the window.
        sizes: its micro-batches.
    """
    named = f"samples {list(ids[:SHOWN])}{f' and {len(ids) - SHOWN} more' if len(ids) > SHOWN else ''}"
    first = 0
    try:
        with preserved_random_state(), torch.no_grad():
            for size in sizes:
                part = ids[first : first + size]
                first += size
                if _is_finite(workload, train_state, part):
                    continue
                while len(part) > 1:
                    half = part[: len(part) // 2]
                    part = part[len(half) :] if _is_finite(workload, train_state, half) else half
                if not _is_finite(workload, train_state, part):
                    return f"sample {part[0]} does it alone ({named})"
                break
    except Exception:  # a diagnosis must not hide what it is about
        return named
    return named


def _is_finite(workload: Workload, train_state: TrainState, ids: Sequence[int]) -> bool:
    train_state.buffers.take()
    try:
        batch = to_device(load_micro_batch(workload, ids), train_state.device)
        with precision_context(train_state.device, train_state.precision):
            if isinstance(train_state.loss, WholeBatchLoss):
                rows = tensors_of(train_state.loss.represent(train_state.model, batch))
                return all(bool(one.isfinite().all()) for one in rows)
            loss = train_state.loss(train_state.model, batch)
        return math.isfinite(float(loss.total if isinstance(loss, Loss) else loss))
    finally:
        train_state.buffers.restore()
