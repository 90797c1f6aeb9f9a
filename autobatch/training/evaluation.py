"""Validation: means over all held-out samples, whatever the micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from autobatch.device.base import Device, Meter
from autobatch.device.oom import Verdict, classify, first_line
from autobatch.errors import DoesNotFitError, InputError
from autobatch.samples import join
from autobatch.step import Trainee, precision_context, tensors_of, to_device
from autobatch.workload import Batch, Loss, Workload, kind_of, user_code


def evaluate(
    workload: Workload,
    trainee: Trainee,
    *,
    device: Device,
    meter: Meter,
    micro_batch: int,
    poll: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Loss and metrics over the validation data; empty where the workload has none.

    Each figure is Σ totals ÷ Σ counts in float64, so a short last micro-batch weighs what it holds. Out of
    memory, the samples run again in half the micro-batch.

    Args:
        workload: has the data, the loss and the metrics.
        trainee: the model; the modes of its modules are put back afterwards.
        device: gives back what it holds after an out-of-memory error.
        meter: told of each batch.
        micro_batch: samples at a time.
        poll: called before each micro-batch; may raise to stop.

    Raises:
        DoesNotFitError: out of memory at one sample at a time.
        InputError: a figure is no number.
    """
    data = workload.validation_data
    if data is None:
        return {}
    totals: dict[str, float] = {}
    counts: dict[str, float] = {}
    modes = [(module, module.training) for module in trainee.model.modules()]
    trainee.model.eval()
    try:
        first, size = 0, len(data)  # type: ignore[arg-type]
        while first < size:
            poll()
            ids = range(first, min(first + micro_batch, size))
            figures = _figures(workload, trainee, meter, ids)
            if isinstance(figures, str):
                # Out of the except block: nothing keeps the failed batch's tensors alive any more.
                device.release()
                if len(ids) == 1:
                    raise DoesNotFitError(f"out of memory in validation at a micro-batch of 1: {figures}")
                micro_batch = math.ceil(len(ids) / 2)
                continue
            for name, (total, count) in figures.items():
                totals[name] = totals.get(name, 0.0) + total
                counts[name] = counts.get(name, 0.0) + count
            first = ids.stop
    finally:
        for module, training in modes:
            module.training = training
    return {name: totals[name] / counts[name] for name in totals if counts[name]}


def _figures(
    workload: Workload, trainee: Trainee, meter: Meter, ids: Sequence[int]
) -> dict[str, tuple[float, float]] | str:
    """Total and count of each figure over some samples; what an out-of-memory error said."""
    try:
        with torch.no_grad():
            with meter.aside():
                batch = to_device(join(workload, ids, data=workload.validation_data), trainee.device)
            meter.adopt(tensors_of(batch))
            with precision_context(trainee.device, trainee.precision):
                with user_code("loss"):
                    figures: dict[str, Tensor | Loss] = {"loss": workload.loss(trainee.model, batch)}
                figures |= _metrics(workload, trainee, batch)
            return {name: _pair(name, figure, len(ids)) for name, figure in figures.items()}
    except Exception as error:
        if classify(error) in (Verdict.DEVICE, Verdict.HOST):
            return first_line(error)
        raise


def _metrics(workload: Workload, trainee: Trainee, batch: Batch) -> dict[str, Tensor | Loss]:
    if workload.metrics is None:
        return {}
    with user_code("metrics"):
        figures = workload.metrics(trainee.model, batch)
    if not isinstance(figures, Mapping):
        raise InputError(f"Workload(metrics=…) must return names and figures, found {kind_of(figures)}")
    return dict(figures)


def _pair(name: str, figure: Tensor | Loss, size: int) -> tuple[float, float]:
    try:
        if isinstance(figure, Loss):
            return float(figure.total), float(figure.count)
        return float(figure) * size, float(size)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"the figure {name!r} of validation must be a 0-d tensor, a number or a Loss, found "
            f"{kind_of(figure)} ({error})"
        ) from error
