"""Validation: means over all held-out samples, independent of the micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from autobatch.core.errors import DoesNotFitError, InputError
from autobatch.device.base import Device, Meter
from autobatch.device.oom import Verdict, classify, first_line, loses_context
from autobatch.planning import split_evenly
from autobatch.step.train_state import TrainState, precision_context
from autobatch.step.whole_batch import Rows
from autobatch.workload.contract import Collated, Loss, WholeBatchLoss, Workload, kind_of
from autobatch.workload.data import load_micro_batch
from autobatch.workload.nested import tensors_of, to_device
from autobatch.workload.rng import preserved_random_state
from autobatch.workload.user_code import user_code

SANITY_SAMPLES = 2
"""Validation samples that loss and metrics are tried on before training."""


MOST_GROWTH = 2
"""Most validation samples at once, in training micro-batches."""


def evaluate(
    workload: Workload,
    train_state: TrainState,
    *,
    device: Device,
    meter: Meter,
    batch_size: ValidationBatchSize,
    target_batch: int,
    poll: Callable[[], None] = lambda: None,
) -> dict[str, float | None]:
    """Compute loss and metrics over the validation data; empty if the workload has none.

    Each value is Σ totals ÷ Σ counts in float64, or ``None`` if that is not finite. After an out-of-memory
    error the samples run again in half the micro-batch. A `WholeBatchLoss` depends on the number of samples,
    so it is computed over batches of ``target_batch``, of which the last may be short.

    Args:
        workload: has the data, the loss and the metrics.
        train_state: the model; the modes of its modules are restored.
        device: releases cached memory after an out-of-memory error, and after micro-batches larger than the
            training's, whose blocks training cannot reuse.
        meter: counts each micro-batch.
        batch_size: the micro-batch, adapted to what fits.
        target_batch: samples of an optimizer step.
        poll: called before each micro-batch; may raise to stop.

    Raises:
        DoesNotFitError: out of memory at a micro-batch of 1.
        InputError: a metric is not a number.
    """
    sums = evaluate_part(
        workload,
        train_state,
        device=device,
        meter=meter,
        batch_size=batch_size,
        target_batch=target_batch,
        poll=poll,
    )
    return sums.means()


def evaluate_part(
    workload: Workload,
    train_state: TrainState,
    *,
    device: Device,
    meter: Meter,
    batch_size: ValidationBatchSize,
    target_batch: int,
    poll: Callable[[], None] = lambda: None,
    part: tuple[int, int] = (0, 1),
) -> Sums:
    """Compute the sums of a part of the validation data; see `evaluate`.

    ``part`` is the number of the part, and of all parts, each a range of samples.
    """
    data = workload.validation_data
    sums = Sums()
    if data is None:
        return sums
    with eval_mode(train_state.model):
        start, end = _bounds(workload, target_batch, part)
        whole = WholeBatchRows(range(start, min(start + target_batch, end)))
        while start < end:
            poll()
            if start == whole.ids.stop:
                whole = WholeBatchRows(range(start, min(start + target_batch, end)))
            limit = whole.ids.stop if isinstance(workload.loss, WholeBatchLoss) else end
            ids = range(start, min(start + batch_size.micro_batch, limit))
            is_larger = len(ids) > batch_size.start
            found = evaluate_micro_batch(workload, train_state, meter, ids, whole, any_error=is_larger)
            if isinstance(found, str):
                # Outside of the except block, so that nothing holds the tensors of the failed micro-batch.
                device.release()
                if len(ids) == 1:
                    raise _does_not_fit(found)
                batch_size.record_failure(len(ids))
                continue
            batch_size.record_fit(len(ids))
            sums.add(found)
            start = ids.stop
    if batch_size.micro_batch > batch_size.start:
        device.release()
    return sums


def _does_not_fit(reason: str) -> DoesNotFitError:
    return DoesNotFitError(
        f"out of memory in validation at a micro-batch of 1: {reason.rstrip('.')}. Free memory, or give "
        "a larger --memory-budget"
    )


def _bounds(workload: Workload, target_batch: int, part: tuple[int, int]) -> tuple[int, int]:
    """Return the range of samples of a part; a loss over the whole batch gets whole batches."""
    samples = len(workload.validation_data)  # type: ignore[arg-type]
    unit = target_batch if isinstance(workload.loss, WholeBatchLoss) else 1
    counts = split_evenly(math.ceil(samples / unit), part[1])
    first = unit * sum(counts[: part[0]])
    return min(first, samples), min(first + unit * counts[part[0]], samples)


def sanity_check_validation(
    workload: Workload, train_state: TrainState, *, device: Device, meter: Meter
) -> None:
    """Run loss and metrics on the first validation samples, so that a mistake in them shows before training.

    Raises:
        InputError: a metric is not a number.
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
            batch_size=ValidationBatchSize(SANITY_SAMPLES),
            target_batch=SANITY_SAMPLES,
        )
    # Without a backward pass the last gathered parameters are still whole.
    train_state.forget_gathered()


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode within the block, then restore the mode of each module."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class Sums:
    """Sums of totals and counts, by metric."""

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}
        self._counts: dict[str, float] = {}

    def add(self, found: Mapping[str, tuple[float, float]]) -> None:
        """Add totals and counts."""
        for name, (total, count) in found.items():
            self._totals[name] = self._totals.get(name, 0.0) + total
            self._counts[name] = self._counts.get(name, 0.0) + count

    def to_plain(self) -> dict[str, list[str]]:
        """Return the sums as JSON that keeps every bit, also of what is not finite."""
        return {name: [total.hex(), self._counts[name].hex()] for name, total in self._totals.items()}

    def add_plain(self, other: Mapping[str, Sequence[str]]) -> None:
        """Add the sums of another part."""
        for name, (total, count) in other.items():
            self.add({name: (float.fromhex(total), float.fromhex(count))})

    def means(self) -> dict[str, float | None]:
        """Return Σ totals ÷ Σ counts of each metric; None if that is not finite."""
        means = {
            name: total / self._counts[name] for name, total in self._totals.items() if self._counts[name]
        }
        return {name: mean if math.isfinite(mean) else None for name, mean in means.items()}


class WholeBatchRows:
    """The rows of one validation batch, for a loss over the whole batch."""

    def __init__(self, ids: range) -> None:
        self.ids = ids
        self._rows = Rows(len(ids))

    def add(self, loss: WholeBatchLoss, model: nn.Module, batch: Collated, ids: range) -> dict[str, Loss]:
        """Add the rows of a micro-batch; after the last one, return the loss of the batch."""
        start = ids.start - self.ids.start
        self._rows.put(range(start, start + len(ids)), loss.represent(model, batch))
        if ids.stop < self.ids.stop:
            return {}
        count = len(self.ids)
        return {"loss": Loss(loss.loss(model, self._rows.collated) * count, count)}


def evaluate_micro_batch(
    workload: Workload,
    train_state: TrainState,
    meter: Meter,
    ids: range,
    whole: WholeBatchRows,
    *,
    any_error: bool,
) -> dict[str, tuple[float, float]] | str:
    """Return total and count of each metric, or the message of an error that fewer samples may avoid.

    That is an out-of-memory error, or with ``any_error`` any error: a size that the user did not ask for may
    fail otherwise, for example in kernels with 32-bit indices.
    """
    try:
        with torch.no_grad():
            with meter.uncounted():
                batch = to_device(
                    load_micro_batch(workload, ids, data=workload.validation_data), train_state.device
                )
            meter.count(tensors_of(batch))
            with precision_context(train_state.device, train_state.precision):
                values: dict[str, Tensor | Loss] = {}
                with user_code("loss"):
                    if isinstance(workload.loss, WholeBatchLoss):
                        values |= whole.add(workload.loss, train_state.model, batch, ids)
                    else:
                        values["loss"] = train_state.call(workload.loss, batch)
                values |= _metrics(workload, train_state, batch)
            return {name: _total_and_count(name, value, len(ids)) for name, value in values.items()}
    except Exception as error:
        if loses_context(error):
            raise
        if any_error or classify(error) in (Verdict.DEVICE, Verdict.HOST):
            return first_line(error)
        raise


def _metrics(workload: Workload, train_state: TrainState, batch: Collated) -> dict[str, Tensor | Loss]:
    if workload.metrics is None:
        return {}
    with user_code("metrics"):
        metrics = train_state.call(workload.metrics, batch)
    if not isinstance(metrics, Mapping):
        raise InputError(
            f"Workload(metrics=…) must return a mapping of names to values, found {kind_of(metrics)}"
        )
    for name in metrics:
        if not isinstance(name, str):
            raise InputError(f"Workload(metrics=…) must name each value with text, found the name {name!r}")
        if name == "loss":
            raise InputError(
                "Workload(metrics=…) returned a metric named 'loss', which is the name of the validation "
                "loss: rename the metric"
            )
    return dict(metrics)


def _total_and_count(name: str, value: Tensor | Loss, size: int) -> tuple[float, float]:
    try:
        if isinstance(value, Loss):
            total, count = float(value.total), float(value.count)
        else:
            total, count = float(value) * size, float(size)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"the validation metric {name!r} must be a 0-d tensor, a number or a Loss, found "
            f"{kind_of(value)} ({error})"
        ) from error
    if not 0 <= count < math.inf:
        raise InputError(
            f"the count of the validation metric {name!r} must be finite and at least 0, found {count:g} for "
            f"{size} samples: return the number of items that its total sums over"
        )
    return total, count


class ValidationBatchSize:
    """The validation micro-batch: doubled if that fits, halved after an out-of-memory error.

    A forward pass without gradients keeps no activations, so it takes more samples than training does. The
    size starts at the training micro-batch and grows to `MOST_GROWTH` times that. Larger sizes gain little,
    and reach kernels with 32-bit indices. A size that failed is not tried again.

    Args:
        micro_batch: samples to start with.
        grows: whether to try larger sizes; False if running out of memory would end the process.
    """

    def __init__(self, micro_batch: int, *, grows: bool = False) -> None:
        self.micro_batch = micro_batch
        self.start = micro_batch
        self._grows = grows
        self._smallest_failed = math.inf

    def record_fit(self, size: int) -> None:
        """Record that this many samples fit."""
        may_grow = 2 * size < self._smallest_failed and 2 * size <= MOST_GROWTH * self.start
        if self._grows and size == self.micro_batch and may_grow:
            self.micro_batch = 2 * size

    def record_failure(self, size: int) -> None:
        """Record that this many samples failed."""
        self._smallest_failed = min(self._smallest_failed, size)
        self.micro_batch = math.ceil(size / 2)


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
