"""Validation of a model that ranks share: every rank makes as many forward passes, because each gathers."""

from __future__ import annotations

import math

from autobatch.core.errors import DoesNotFitError
from autobatch.device.base import Meter
from autobatch.planning import split_evenly
from autobatch.step.train_state import TrainState
from autobatch.training.evaluation import Sums, WholeBatchRows, eval_mode, evaluate_micro_batch
from autobatch.workload.contract import Workload


def evaluate_shared(
    workload: Workload, train_state: TrainState, *, meter: Meter, micro_batch: int, part: tuple[int, int]
) -> Sums:
    """Compute the sums of this rank's part of the validation data; all ranks call it.

    Args:
        workload: has the data, the loss and the metrics.
        train_state: the model; the modes of its modules are restored.
        meter: counts each micro-batch.
        micro_batch: samples at once, the same on every rank.
        part: the number of the part, and of all parts, each a range of samples.

    Raises:
        DoesNotFitError: memory ran out, while other ranks wait for this one.
    """
    data, sums = workload.validation_data, Sums()
    if data is None:
        return sums
    sizes = split_evenly(len(data), part[1])  # type: ignore[arg-type]
    start = sum(sizes[: part[0]])
    end = start + sizes[part[0]]
    with eval_mode(train_state.model):
        for _ in range(math.ceil(max(sizes) / micro_batch)):
            own = range(start, min(start + micro_batch, end))
            # A rank that is done still joins the collectives of the others. Its figures do not count.
            ids = own or range(1)
            found = evaluate_micro_batch(
                workload, train_state, meter, ids, WholeBatchRows(ids), any_error=False
            )
            if isinstance(found, str):
                raise DoesNotFitError(
                    f"out of memory in validation at a micro-batch of {len(ids)}, for which other ranks of a "
                    f"shared model wait: {found.rstrip('.')}. Give a smaller --validation-micro-batch"
                )
            if own:
                sums.add(found)
            start = own.stop if own else start
    # Without a backward pass the last gathered parameters are still whole.
    train_state.forget_gathered()
    return sums
