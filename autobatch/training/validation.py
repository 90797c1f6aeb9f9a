"""Validation: means over all held-out samples, independent of the micro-batch.

Each rank computes a range of the samples, and the sums of all ranks give the means: Σ totals ÷ Σ counts in
float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from autobatch.core.errors import DoesNotFitError, InputError
from autobatch.device.base import Device, Meter
from autobatch.device.oom import Verdict, classify, first_line
from autobatch.distributed.ranks import Ranks
from autobatch.planning import split_evenly
from autobatch.step.loss import named_terms
from autobatch.step.train_state import TrainState, precision_context
from autobatch.step.whole_batch import Rows
from autobatch.workload.contract import Loss, WholeBatchLoss, Workload, kind_of
from autobatch.workload.data import load_micro_batch
from autobatch.workload.nested import tensors_of, to_device
from autobatch.workload.rng import preserved_random_state
from autobatch.workload.user_code import user_code

CHECKED_SAMPLES = 4
"""Validation samples that loss and metrics are tried on before training."""
Sums: TypeAlias = dict[tuple[str, ...], tuple[float, float]]
"""Total and count of each metric by its name, and of the terms of a loss by ``loss`` and their names."""


class Validator:
    """The loss and the metrics over the validation data.

    The micro-batch is halved after an out-of-memory error. The ranks of a sharded model run the same number
    of passes of the same size, because each waits for the others.

    A `WholeBatchLoss` depends on the number of samples, so it is computed over batches of ``target_batch``,
    of which the last may be short.

    Args:
        workload: has the data, the loss and the metrics.
        train_state: the model; the modes of its modules are restored.
        device: where it runs.
        meter: counts each micro-batch.
        target_batch: samples of an optimizer step.
        micro_batch: samples to start with.
        ranks: the ranks, each of which takes a part of the samples; None if this process trains alone.
        note: called with a line if memory runs out at a size that trains.
    """

    def __init__(
        self,
        workload: Workload,
        train_state: TrainState,
        *,
        device: Device,
        meter: Meter,
        target_batch: int,
        micro_batch: int,
        ranks: Ranks | None = None,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._workload = workload
        self._train_state = train_state
        self._device = device
        self._meter = meter
        self._unit = target_batch if isinstance(workload.loss, WholeBatchLoss) else 1
        self.micro_batch = micro_batch
        self._ranks = ranks or Ranks()
        self._note = note

    def run(self, is_asked: Callable[[], bool] = lambda: False) -> dict[str, float | None]:
        """Return the mean of the loss and of each metric over the samples of all ranks; all of them call it.

        A mean is None if it is not finite. Without validation data there are none.

        Args:
            is_asked: whether to stop early, asked before each micro-batch.

        Raises:
            DoesNotFitError: out of memory at a micro-batch of 1, on some rank.
            InputError: a metric is not a number, or has the name of a term of the loss.
        """
        own: Sums = {}
        failure = ""
        try:
            with eval_mode(self._train_state.model):
                if self._workload.validation_data is not None:
                    self._add_own_samples(own, is_asked)
        except DoesNotFitError as error:
            if self._train_state.shared is not None:
                raise  # in the middle of a pass of all ranks
            # Other ranks wait for the sums of this one.
            failure = str(error)
        # Without a backward pass the last gathered parameters are still whole.
        self._train_state.forget_gathered()
        sums: Sums = {}
        for part, reason in self._ranks.gather((own, failure)):
            if reason:
                raise DoesNotFitError(reason)
            _add(sums, part)
        means = {key: total / count for key, (total, count) in sums.items() if count}
        found = {key[0]: mean for key, mean in means.items() if len(key) == 1}
        terms = {key[1]: mean for key, mean in means.items() if len(key) == 2}
        if both := found.keys() & terms.keys():
            raise InputError(
                f"Workload(metrics=…) and the loss both have {', '.join(sorted(both))}: rename the "
                "metric, because the mean of each term of the loss is one already"
            )
        if terms:
            found = {"loss": sum(terms.values()), **terms, **found}
        return {name: mean if math.isfinite(mean) else None for name, mean in found.items()}

    def _add_own_samples(self, sums: Sums, is_asked: Callable[[], bool]) -> None:
        """Add totals and counts of the samples of this rank."""
        ranks, samples = self._ranks, len(self._workload.validation_data)  # type: ignore[arg-type]
        is_shared = self._train_state.shared is not None
        units = split_evenly(math.ceil(samples / self._unit), ranks.world)
        start = min(self._unit * sum(units[: ranks.rank]), samples)
        end = min(start + self._unit * units[ranks.rank], samples)
        step = self._unit if self._unit > 1 else max(1, end - start)
        for batch in (range(first, min(first + step, end)) for first in range(start, end, step)):
            rows, place = Rows(len(batch)), batch.start
            while place < batch.stop:
                if is_asked() and not is_shared:  # one rank of a sharded model cannot stop alone
                    return
                ids = range(place, min(place + self.micro_batch, batch.stop))
                found = self._run_micro_batch(ids, batch, rows)
                # Outside of the except block, so that nothing holds the tensors that failed.
                if isinstance(found, str):
                    self._halve(len(ids), found)
                else:
                    _add(sums, found)
                    place = ids.stop
        # A rank that is done still joins the collectives of the others. What it computes does not count.
        passes, most = (math.ceil(count / self.micro_batch) for count in (end - start, max(units)))
        for _ in range(most - passes if is_shared else 0):
            found = self._run_micro_batch(range(1), range(1), Rows(1))
            if isinstance(found, str):
                self._halve(1, found)

    def _halve(self, size: int, message: str) -> None:
        """Halve the micro-batch after one of ``size`` samples ran out of memory, or raise."""
        self._device.release()
        where = f"out of memory in validation at a micro-batch of {size}"
        reason = message.rstrip(".")
        if self._train_state.shared is not None:
            raise DoesNotFitError(
                f"{where}, for which the other ranks of the sharded model wait: {reason}. Give a smaller "
                "--max-micro-batch"
            )
        if size == 1:
            raise DoesNotFitError(f"{where}: {reason}. Free memory, or give a larger --memory-budget")
        self.micro_batch = math.ceil(size / 2)
        self._note(
            f"{where}, continued at {self.micro_batch}: its samples may be larger than those that train, "
            f"or its metrics take memory. {reason}"
        )

    def _run_micro_batch(self, ids: range, batch: range, rows: Rows) -> Sums | str:
        """Return total and count of each metric, or the message of an out-of-memory error.

        A loss over a whole batch collects the rows of ``batch``, of which ``ids`` are a part.
        """
        workload, train_state = self._workload, self._train_state
        try:
            with torch.no_grad():
                with self._meter.uncounted():
                    loaded = load_micro_batch(workload, ids, data=workload.validation_data)
                    micro_batch = to_device(loaded, train_state.device)
                self._meter.count(tensors_of(micro_batch))
                with precision_context(train_state.device, train_state.precision):
                    found: Sums = {}
                    with user_code("loss", workload.loss):
                        if not isinstance(workload.loss, WholeBatchLoss):
                            loss = named_terms(train_state.call(workload.loss, micro_batch))
                            for name, value in loss.items():
                                key = ("loss", name) if name else ("loss",)
                                found[key] = _total_and_count(key[-1], value, len(ids))
                        else:
                            places = range(ids.start - batch.start, ids.stop - batch.start)
                            rows.put(places, workload.loss.represent(train_state.model, micro_batch))
                            if ids.stop == batch.stop:
                                mean = workload.loss.loss(train_state.model, rows.collated)
                                whole = Loss(mean * len(batch), len(batch))
                                found["loss",] = _total_and_count("loss", whole, len(ids))
                    if workload.metrics is not None:
                        with user_code("metrics", workload.metrics):
                            metrics = train_state.call(workload.metrics, micro_batch)
                            for name, value in _checked_metrics(metrics).items():
                                found[name,] = _total_and_count(name, value, len(ids))
                return found
        except Exception as error:
            if classify(error) in (Verdict.DEVICE, Verdict.HOST):
                return first_line(error)
            raise


def check_validation(
    workload: Workload, train_state: TrainState, *, device: Device, meter: Meter
) -> list[str]:
    """Run loss and metrics on the first validation samples, so that a mistake in them shows before training.

    Returns:
        A note on each metric that is no mean over samples, and so depends on the micro-batch.

    Raises:
        InputError: a metric is not a number.
        Exception: whatever the workload raises.
    """
    data = workload.validation_data
    if data is None:
        return []
    size = min(CHECKED_SAMPLES, len(data))  # type: ignore[arg-type]
    few = replace(workload, validation_data=Subset(data, range(size)))  # type: ignore[arg-type]

    def means(micro_batch: int) -> dict[str, float | None]:
        return Validator(
            few, train_state, device=device, meter=meter, target_batch=size, micro_batch=micro_batch
        ).run()

    with preserved_random_state():
        whole = means(size)
        if size < 2 or workload.metrics is None:
            return []
        again, parts = means(size), means(size - 1)
    tolerance = 1e-4 if train_state.precision == "fp32" else 3e-2
    notes = []
    for name, value in whole.items():
        part = parts[name]
        # A metric that draws at random tells nothing.
        if name == "loss" or value is None or part is None or value != again[name]:
            continue
        if not math.isclose(value, part, rel_tol=tolerance, abs_tol=tolerance):
            notes.append(
                f"the validation metric {name!r} is no mean over samples: {size} samples have {value:.4g} at "
                f"once, and {part:.4g} as the mean of {size - 1} and 1, so that it depends on the "
                "micro-batch. Return Loss(total, count) with sums over samples or items, or compute it from "
                "such sums after the run"
            )
    return notes


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


def _add(sums: Sums, found: Sums) -> None:
    for name, (total, count) in found.items():
        before = sums.get(name, (0.0, 0.0))
        sums[name] = before[0] + total, before[1] + count


def _checked_metrics(metrics: object) -> dict[str, Tensor | Loss]:
    if isinstance(metrics, Mapping) and all(isinstance(name, str) and name != "loss" for name in metrics):
        return dict(metrics)
    found = f"the names {[*metrics]}" if isinstance(metrics, Mapping) else kind_of(metrics)
    raise InputError(
        "Workload(metrics=…) must return a mapping of names to values, where each name is text other than "
        f"'loss', found {found}: rename the metric, or return a dict"
    )


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
