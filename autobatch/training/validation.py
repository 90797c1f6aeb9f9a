"""Validation: means over all held-out samples, independent of the micro-batch.

Each rank computes a range of the samples, and the sums of all ranks give the means: Σ totals ÷ Σ counts in
float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Subset

from autobatch.core.errors import DoesNotFitError, InputError
from autobatch.device.oom import Verdict, classify, first_line
from autobatch.distributed.ranks import Ranks
from autobatch.planning import split_evenly
from autobatch.step.loss import named_terms
from autobatch.step.train_state import precision_context
from autobatch.step.whole_batch import Rows
from autobatch.training.loop import Loop
from autobatch.workload.contract import Loss, WholeBatchLoss, kind_of
from autobatch.workload.data import load_micro_batch
from autobatch.workload.nested import tensors_of, to_device
from autobatch.workload.rng import preserved_random_state
from autobatch.workload.user_code import user_code

CHECKED_SAMPLES = 4
"""Validation samples that loss and metrics are tried on before training."""
Sums: TypeAlias = dict[tuple[str, ...], tuple[float, float]]
"""Total and count of each metric by its name, and of the terms of a loss by ``loss`` and their names."""


class Validator:
    """The loss and the metrics over the validation data of a loop, in micro-batches as it trains them.

    The micro-batch is halved after an out-of-memory error. The ranks of a sharded model run the same number
    of passes of the same size, because each waits for the others.

    A `WholeBatchLoss` depends on the number of samples, so it is computed over batches of the training's
    size, of which the last may be short.
    """

    def __init__(self, loop: Loop, *, note: Callable[[str], None] = lambda _: None) -> None:
        self.workload, self.ranks = loop.workload, loop.engine.ranks
        self.micro_batch = loop.split.of_longest(loop.micro_batch)
        self._train_state, self._device, self._meter = loop.train_state, loop.device, loop.meter
        self._unit = loop.sampler.target_batch if isinstance(loop.workload.loss, WholeBatchLoss) else 1
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
        modes = [(module, module.training) for module in self._train_state.model.modules()]
        try:
            self._train_state.model.eval()
            if self.workload.validation_data is not None:
                self._add_own_samples(own, is_asked)
        except DoesNotFitError as error:
            if self._train_state.shared is not None:
                raise  # in the middle of a pass of all ranks
            failure = str(error)  # other ranks wait for the sums of this one
        finally:
            for module, training in modes:
                module.training = training
        # Without a backward pass the last gathered parameters are still whole.
        self._train_state.forget_gathered()
        sums: Sums = {}
        for part, reason in self.ranks.gather((own, failure)):
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
        ranks, samples = self.ranks, len(self.workload.validation_data)  # type: ignore[arg-type]
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
        said = f"out of memory in validation at a micro-batch of {size}: {message.rstrip('.')}"
        if self._train_state.shared is not None:
            waits = "The other ranks of the sharded model wait for it"
            raise DoesNotFitError(f"{said}. {waits}: give a smaller --max-micro-batch")
        if size == 1:
            raise DoesNotFitError(f"{said}. Free memory, or give a larger --memory-budget")
        self.micro_batch = math.ceil(size / 2)
        self._note(f"{said}. Continued at {self.micro_batch}")

    def _run_micro_batch(self, ids: range, batch: range, rows: Rows) -> Sums | str:
        """Return total and count of each metric, or the message of an out-of-memory error.

        A loss over a whole batch collects the rows of ``batch``, of which ``ids`` are a part.
        """
        workload, train_state, size = self.workload, self._train_state, len(ids)
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
                                found[key] = _total_and_count(key[-1], value, size)
                        else:
                            places = range(ids.start - batch.start, ids.stop - batch.start)
                            rows.put(places, workload.loss.represent(train_state.model, micro_batch))
                            if ids.stop == batch.stop:
                                mean = workload.loss.loss(train_state.model, rows.collated)
                                found["loss",] = _total_and_count("loss", mean, len(batch))
                    if workload.metrics is not None:
                        with user_code("metrics", workload.metrics):
                            metrics = _named(train_state.call(workload.metrics, micro_batch))
                            for name, value in metrics.items():
                                found[name,] = _total_and_count(name, value, size)
                return found
        except Exception as error:
            if classify(error) in (Verdict.DEVICE, Verdict.HOST):
                return first_line(error)
            raise


def check_validation(loop: Loop) -> list[str]:
    """Run loss and metrics on the first validation samples, so that a mistake in them shows before training.

    Returns:
        A note on each metric that is no mean over samples, and so depends on the micro-batch.

    Raises:
        InputError: a metric is not a number.
        Exception: whatever the workload raises.
    """
    data = loop.workload.validation_data
    if data is None:
        return []
    validator, size = Validator(loop), min(CHECKED_SAMPLES, len(data))  # type: ignore[arg-type]
    validator.workload = replace(loop.workload, validation_data=Subset(data, range(size)))  # type: ignore[arg-type]
    validator.ranks = Ranks()  # each rank runs all of them

    def means(micro_batch: int) -> dict[str, float | None]:
        validator.micro_batch = micro_batch
        return validator.run()

    with preserved_random_state():
        whole, again = means(size), means(size)
        parts = means(max(1, size - 1))
    tolerance = 1e-4 if loop.train_state.precision == "fp32" else 3e-2
    return [
        f"the validation metric {name!r} is no mean over samples: {size} samples have {value:.4g} at once, "
        f"and {part:.4g} as the mean of {size - 1} and 1, so that it depends on the micro-batch. Return "
        "Loss(total, count) with sums over samples or items, or compute it from such sums after the run"
        for name, value in whole.items()
        # A metric that draws at random tells nothing.
        if name != "loss" and value is not None and value == again[name]
        if (part := parts[name]) is not None
        and not math.isclose(value, part, rel_tol=tolerance, abs_tol=tolerance)
    ]


def _add(sums: Sums, found: Sums) -> None:
    for name, (total, count) in found.items():
        before = sums.get(name, (0.0, 0.0))
        sums[name] = before[0] + total, before[1] + count


def _named(metrics: object) -> Mapping[str, Tensor | Loss]:
    if isinstance(metrics, Mapping) and all(isinstance(name, str) and name != "loss" for name in metrics):
        return metrics
    raise InputError(
        "Workload(metrics=…) must return a mapping of names to values, where each name is text other than "
        f"'loss', found {kind_of(metrics)}: rename the metric, or return a dict"
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
