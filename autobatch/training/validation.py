"""Validation: means over all held-out samples, independent of the micro-batch.

Each rank computes a range of the samples, and the sums of all ranks give the means: Σ totals ÷ Σ counts in
float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor

from autobatch.core.errors import DoesNotFitError, InputError
from autobatch.device.oom import Verdict, classify, first_line
from autobatch.planning import split_evenly
from autobatch.step.loss import terms_of
from autobatch.step.train_state import TrainState, precision_context
from autobatch.training.loop import Loop
from autobatch.workload.contract import Loss, WholeBatchLoss, kind_of
from autobatch.workload.data import load_micro_batch
from autobatch.workload.nested import tensors_of, to_device
from autobatch.workload.rng import preserved_random_state
from autobatch.workload.user_code import user_code

CHECKED_SAMPLES = 4
"""Validation samples that loss and metrics are tried on before training."""
LOSS, METRIC = "loss", "validation metric"
Sums: TypeAlias = dict[tuple[str, str], tuple[float, float]]
"""Total and count of each metric, and of each term of a loss, by its kind and its name."""


class Validator:
    """The loss and the metrics over the validation data of a loop, in micro-batches as it trains them.

    The micro-batch is halved after an out-of-memory error. The ranks of a sharded model run the same number
    of passes of the same size, because each waits for the others.

    A `WholeBatchLoss` has no mean here, because it depends on the number of samples.
    """

    def __init__(self, loop: Loop, *, note: Callable[[str], None] = lambda _: None) -> None:
        self._loop, self._note = loop, note
        self._micro_batch = loop.split.of_longest(loop.micro_batch)

    def run(self) -> dict[str, float | None]:
        """Return the mean of the loss and of each metric over the samples of all ranks; all of them call it.

        A mean is None if it is not finite. Without validation data there are none. It ends early if this
        process is asked to stop.

        Raises:
            DoesNotFitError: out of memory at a micro-batch of 1, on some rank.
            InputError: a metric is not a number.
        """
        own, sums, failure, engine = Sums(), Sums(), "", self._loop.engine
        if self._loop.workload.validation_data is None:
            return {}
        with _eval_mode(self._loop.train_state):
            try:
                self._add_own_samples(own)
            except DoesNotFitError as error:
                if not engine.is_alone:
                    raise  # in the middle of a pass of all ranks
                failure = str(error)  # other ranks wait for the sums of this one
        for part, reason in engine.ranks.gather((own, failure)):
            if reason:
                raise DoesNotFitError(reason)
            _add(sums, part)
        return _means(sums)

    def _add_own_samples(self, sums: Sums) -> None:
        """Add totals and counts of the samples of this rank."""
        engine = self._loop.engine
        shares = split_evenly(len(self._loop.workload.validation_data), engine.ranks.world)
        own = shares[engine.ranks.rank]
        place = sum(shares[: engine.ranks.rank])
        end = place + own
        while place < end:
            # One rank of a shared model cannot stop alone.
            if engine.is_alone and engine.request.is_asked:
                return
            ids = range(place, min(place + self._micro_batch, end))
            place += len(ids) if self._add(sums, ids) else 0
        # A rank that is done still joins the collectives of the others. What it computes does not count.
        passes, most = (math.ceil(count / self._micro_batch) for count in (own, max(shares)))
        for _ in range(0 if engine.is_alone else most - passes):
            self._add({}, range(1))

    def _add(self, sums: Sums, ids: range) -> bool:
        """Add a micro-batch to the sums. Return False if memory ran out, and a smaller one is left to try."""
        found = _sums_of(self._loop, ids)
        # Outside of the except block, so that nothing holds the tensors that failed.
        if not isinstance(found, str):
            _add(sums, found)
            return True
        size = len(ids)
        self._loop.device.release()
        said = f"out of memory in validation at a micro-batch of {size}: {found.rstrip('.')}"
        if size == 1 or not self._loop.engine.is_alone:
            waits = "The other ranks of the sharded model wait for it: give a smaller --max-micro-batch"
            free = "Free memory, or give a larger --memory-budget"
            raise DoesNotFitError(f"{said}. {free if size == 1 else waits}")
        self._micro_batch = math.ceil(size / 2)
        self._note(f"{said}. Continued at {self._micro_batch}")
        return False


def check_validation(loop: Loop) -> list[str]:
    """Run loss and metrics on the first validation samples, so that a mistake in them shows before training.

    Returns:
        A note on each metric that is no mean over samples, and so depends on the micro-batch, and on a loss
        that is left out.

    Raises:
        InputError: a metric is not a number.
        Exception: whatever the workload raises.
    """
    data = loop.workload.validation_data
    if data is None:
        return []
    batch = range(min(CHECKED_SAMPLES, len(data)))
    cut = max(1, len(batch) - 1)

    def means(*parts: range) -> dict[str, float | None]:
        sums: Sums = {}
        with preserved_random_state():  # the same draws each time
            for ids in parts:
                if not isinstance(found := _sums_of(loop, ids), str):
                    _add(sums, found)
        return _means(sums)

    with _eval_mode(loop.train_state):
        whole, split = means(batch), means(batch[:cut], batch[cut:]) if len(batch) > 1 else {}
    tolerance = 1e-4 if loop.train_state.precision == "fp32" else 3e-2
    left_out = (
        "there is no held-out loss, because a WholeBatchLoss depends on the number of samples: give "
        "Workload(metrics=…)"
    )
    return [left_out] * isinstance(loop.workload.loss, WholeBatchLoss) + [
        f"the validation metric {name!r} is no mean over samples: {len(batch)} samples have {value:.4g} at "
        f"once, and {part:.4g} as the mean of {cut} and 1, so that it depends on the micro-batch. Return "
        "Loss(total, count) with sums over samples or items, or compute it from such sums after the run"
        for name, value in whole.items()
        if name != LOSS and value is not None and (part := split.get(name)) is not None
        if not math.isclose(value, part, rel_tol=tolerance, abs_tol=tolerance)
    ]


@contextmanager
def _eval_mode(train_state: TrainState) -> Iterator[None]:
    """Hold a model in eval mode within the block; the mode of each module is restored."""
    modes = [(module, module.training) for module in train_state.model.modules()]
    try:
        train_state.model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training
    # Without a backward pass the last gathered parameters are still whole.
    train_state.forget_gathered()


def _sums_of(loop: Loop, ids: range) -> Sums | str:
    """Return total and count of each metric of a micro-batch, or the message of an out-of-memory error."""
    workload, train_state, meter = loop.workload, loop.train_state, loop.train_state.meter
    sums: Sums = {}
    try:
        with torch.no_grad():
            with meter.uncounted():
                loaded = load_micro_batch(workload, ids, "validation_data")
                micro_batch = to_device(loaded, train_state.device)
            meter.count(tensors_of(micro_batch))
            with precision_context(train_state.device, train_state.precision):
                if not isinstance(workload.loss, WholeBatchLoss):
                    with user_code("loss", workload.loss):
                        terms = terms_of(train_state.run(workload.loss, micro_batch))
                        for name, term in terms.items():
                            sums[LOSS, name] = _total_and_count(term, len(ids))
                if workload.metrics is not None:
                    with user_code("metrics", workload.metrics):
                        metrics = train_state.run(workload.metrics, micro_batch)
                        for name, value in _named(metrics).items():
                            sums[METRIC, name] = _total_and_count(value, len(ids))
            return sums
    except Exception as error:
        if classify(error) is Verdict.MEMORY:
            return first_line(error)
        raise


def _add(sums: Sums, part: Sums) -> None:
    for place, (total, count) in part.items():
        before = sums.get(place, (0.0, 0.0))
        sums[place] = before[0] + total, before[1] + count


def _means(sums: Sums) -> dict[str, float | None]:
    """Return the mean of each metric, and of a loss of several terms, by name; None if it is not finite."""
    means = {place: total / count for place, (total, count) in sums.items() if count}
    terms = [mean for (kind, _), mean in means.items() if kind == LOSS]
    # A loss of one term has a term without a name.
    named = {name: mean for (_, name), mean in means.items() if name}
    named = {LOSS: sum(terms), **named} if terms else named
    return {name: mean if math.isfinite(mean) else None for name, mean in named.items()}


def _named(metrics: object) -> Mapping[str, Tensor | Loss]:
    if isinstance(metrics, Mapping) and all(isinstance(name, str) and name != LOSS for name in metrics):
        return metrics
    raise InputError(
        "Workload(metrics=…) must return a mapping of names to values, where each name is text other than "
        f"'loss', found {kind_of(metrics)}: rename the metric, or return a dict"
    )


def _total_and_count(value: Tensor | Loss, size: int) -> tuple[float, float]:
    """Return the total of a metric of so many samples, and the number of its items."""
    if isinstance(value, Loss):
        return float(value.total), float(value.count)
    return float(value) * size, float(size)
