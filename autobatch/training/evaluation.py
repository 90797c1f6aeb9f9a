"""Validation: means over all held-out samples, whatever the micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from autobatch.core.errors import DoesNotFitError, InputError
from autobatch.device.base import Device, Meter
from autobatch.device.oom import Verdict, classify, first_line
from autobatch.step.train_state import TrainState, precision_context
from autobatch.step.whole_batch import Rows
from autobatch.workload.contract import Collated, Loss, WholeBatchLoss, Workload, kind_of
from autobatch.workload.data import load_micro_batch
from autobatch.workload.nested import tensors_of, to_device
from autobatch.workload.rng import preserved_random_state
from autobatch.workload.user_code import user_code

SANITY_SAMPLES = 2
"""Validation samples that loss and metrics are tried on before training."""


class ValidationBatchSize:
    """How many samples a forward pass without gradients takes at a time; learnt while validating.

    It keeps no activations for a backward pass, so it takes more samples than training does: the size starts
    at the training's and doubles while that fits. What failed once is not tried again.

    Args:
        micro_batch: samples to start with.
        grows: larger sizes may be tried. Not where running out of memory ends the process, not the batch.
    """

    def __init__(self, micro_batch: int, *, grows: bool = False) -> None:
        self.micro_batch = micro_batch
        self.start = micro_batch
        self._grows = grows
        self._failed = math.inf

    def fitted(self, size: int) -> None:
        """So many samples ran."""
        if self._grows and size == self.micro_batch and 2 * size < self._failed:
            self.micro_batch = 2 * size

    def failed(self, size: int) -> None:
        """So many samples did not run."""
        self._failed = min(self._failed, size)
        self.micro_batch = math.ceil(size / 2)


def evaluate(
    workload: Workload,
    train_state: TrainState,
    *,
    device: Device,
    meter: Meter,
    reach: ValidationBatchSize,
    window: int,
    poll: Callable[[], None] = lambda: None,
) -> dict[str, float | None]:
    """Loss and metrics over the validation data; empty where the workload has none.

    Each figure is Σ totals ÷ Σ counts in float64, so a short last micro-batch weighs what it holds; ``None``
    where that is not finite. Out of memory, the samples run again in half the micro-batch. A `WholeBatchLoss`
    is that of windows as large as those of the training, for of fewer samples it is another figure; the last
    one may be short.

    Args:
        workload: has the data, the loss and the metrics.
        train_state: the model; the modes of its modules are put back afterwards.
        device: gives back what it holds after an out-of-memory error, and after more samples at a time than
            training takes, whose blocks would stand in the way of its own.
        meter: told of each batch.
        reach: samples at a time; learns what fits.
        window: samples of an optimizer step.
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
    modes = [(module, module.training) for module in train_state.model.modules()]
    train_state.model.eval()
    try:
        first, size = 0, len(data)  # type: ignore[arg-type]
        whole = _Whole(range(min(window, size)))
        while first < size:
            poll()
            if first == whole.ids.stop:
                whole = _Whole(range(first, min(first + window, size)))
            end = whole.ids.stop if isinstance(workload.loss, WholeBatchLoss) else size
            ids = range(first, min(first + reach.micro_batch, end))
            figures = _figures(workload, train_state, meter, ids, whole, may_fail=len(ids) > reach.start)
            if isinstance(figures, str):
                # Out of the except block: nothing keeps the failed batch's tensors alive any more.
                device.release()
                if len(ids) == 1:
                    raise DoesNotFitError(f"out of memory in validation at a micro-batch of 1: {figures}")
                reach.failed(len(ids))
                continue
            reach.fitted(len(ids))
            for name, (total, count) in figures.items():
                totals[name] = totals.get(name, 0.0) + total
                counts[name] = counts.get(name, 0.0) + count
            first = ids.stop
    finally:
        for module, training in modes:
            module.training = training
    if reach.micro_batch > reach.start:
        device.release()
    means = {name: totals[name] / counts[name] for name in totals if counts[name]}
    return {name: mean if math.isfinite(mean) else None for name, mean in means.items()}


def sanity_check_validation(
    workload: Workload, train_state: TrainState, *, device: Device, meter: Meter
) -> None:
    """Run loss and metrics on the first validation samples: a mistake in them costs no training.

    Raises:
        InputError: a figure is no number.
        Exception: whatever the workload raises.
    """
    data = workload.validation_data
    if data is None:
        return
    few = Subset(data, range(min(SANITY_SAMPLES, len(data))))  # type: ignore[arg-type]
    with preserved_random_state():
        evaluate(
            replace(workload, validation_data=few),
            train_state,
            device=device,
            meter=meter,
            reach=ValidationBatchSize(SANITY_SAMPLES),
            window=SANITY_SAMPLES,
        )


class _Whole:
    """The rows of a window of validation, for a loss that sees all of them."""

    def __init__(self, ids: range) -> None:
        self.ids = ids
        self._rows = Rows(len(ids))

    def loss(self, loss: WholeBatchLoss, model: nn.Module, batch: Collated, ids: range) -> dict[str, Loss]:
        """Take in a micro-batch; the loss, once its last one is there."""
        self._rows.put(ids.start - self.ids.start, loss.represent(model, batch), len(ids))
        if ids.stop < self.ids.stop:
            return {}
        count = len(self.ids)
        return {"loss": Loss(loss.loss(model, self._rows.collated) * count, count)}


def _figures(
    workload: Workload, train_state: TrainState, meter: Meter, ids: range, whole: _Whole, *, may_fail: bool
) -> dict[str, tuple[float, float]] | str:
    """Total and count of each figure over some samples; what an error said that fewer samples may not raise.

    That is an error of memory, and any at all at a size that nobody asked for (``may_fail``): kernels that
    index with 32 bits, say.
    """
    try:
        with torch.no_grad():
            with meter.uncounted():
                batch = to_device(
                    load_micro_batch(workload, ids, data=workload.validation_data), train_state.device
                )
            meter.count(tensors_of(batch))
            with precision_context(train_state.device, train_state.precision):
                figures: dict[str, Tensor | Loss] = {}
                with user_code("loss"):
                    if isinstance(workload.loss, WholeBatchLoss):
                        figures |= whole.loss(workload.loss, train_state.model, batch, ids)
                    else:
                        figures["loss"] = workload.loss(train_state.model, batch)
                figures |= _metrics(workload, train_state, batch)
            return {name: _pair(name, figure, len(ids)) for name, figure in figures.items()}
    except Exception as error:
        if may_fail or classify(error) in (Verdict.DEVICE, Verdict.HOST):
            return first_line(error)
        raise


def _metrics(workload: Workload, train_state: TrainState, batch: Collated) -> dict[str, Tensor | Loss]:
    if workload.metrics is None:
        return {}
    with user_code("metrics"):
        figures = workload.metrics(train_state.model, batch)
    if not isinstance(figures, Mapping):
        raise InputError(f"Workload(metrics=…) must return names and figures, found {kind_of(figures)}")
    for name in figures:
        if not isinstance(name, str) or name == "loss":
            taken = ", which is that of the held-out loss" if name == "loss" else ""
            raise InputError(f"Workload(metrics=…) must give each figure a name, found {name!r}{taken}")
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
