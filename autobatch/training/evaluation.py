"""Validation: means over all held-out samples, whatever the micro-batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from autobatch.samples import join
from autobatch.step import Trainee, precision_context, to_device
from autobatch.workload import Loss, Workload, user_code


def evaluate(workload: Workload, trainee: Trainee, *, micro_batch: int) -> dict[str, float]:
    """Loss and metrics over the validation data; empty where the workload has none.

    Each figure is Σ totals ÷ Σ counts, so a short last micro-batch weighs what it holds.

    Args:
        workload: has the data, the loss and the metrics.
        trainee: the model; its mode is put back afterwards.
        micro_batch: samples at a time.
    """
    data = workload.validation_data
    if data is None:
        return {}
    totals: dict[str, float] = {}
    counts: dict[str, float] = {}
    training = trainee.model.training
    trainee.model.eval()
    try:
        with torch.no_grad():
            size = len(data)  # type: ignore[arg-type]
            for first in range(0, size, micro_batch):
                ids = range(first, min(first + micro_batch, size))
                batch = to_device(join(workload, ids, data=data), trainee.device)
                with precision_context(trainee.device, trainee.precision), user_code("loss or metrics"):
                    figures: dict[str, Tensor | Loss] = {"loss": workload.loss(trainee.model, batch)}
                    if workload.metrics is not None:
                        figures |= workload.metrics(trainee.model, batch)
                _add(figures, len(ids), totals, counts)
    finally:
        trainee.model.train(training)
    return {name: totals[name] / counts[name] for name in totals if counts[name]}


def _add(
    figures: Mapping[str, Tensor | Loss], size: int, totals: dict[str, float], counts: dict[str, float]
) -> None:
    for name, figure in figures.items():
        total, count = (
            (float(figure.total), float(figure.count))
            if isinstance(figure, Loss)
            else (float(figure) * size, float(size))
        )
        totals[name] = totals.get(name, 0.0) + total
        counts[name] = counts.get(name, 0.0) + count
