"""The learning rates of a step: their warm-up, and the check that they are usable."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from autobatch.core.errors import InputError, NonFiniteError
from autobatch.step.gradients import Optimizers


def warmup_factor(samples_seen: int, warmup_samples: int | None) -> float:
    """Return the warm-up factor of the learning rate for the batch that ends after ``samples_seen``."""
    return 1.0 if warmup_samples is None else min(1.0, samples_seen / warmup_samples)


def scaled_learning_rate(optimizers: Optimizers, factor: float) -> AbstractContextManager[None]:
    """Multiply all learning rates by ``factor`` within the block; schedules never see it."""
    return nullcontext() if factor == 1.0 else _scaled(optimizers, factor)


@contextmanager
def _scaled(optimizers: Optimizers, factor: float) -> Iterator[None]:
    originals = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    try:
        for group, rate in originals:
            group["lr"] = rate * factor
        yield
    finally:
        for group, rate in originals:
            group["lr"] = rate


def check_learning_rates(optimizers: Optimizers, step: int) -> float:
    """Return the learning rate of the first parameter group, 0 if it has none.

    Raises:
        NonFiniteError: a learning rate of step ``step`` is not finite.
        InputError: a learning rate is negative.
    """
    rates = [group.get("lr") for optimizer in optimizers for group in optimizer.param_groups]
    away = [one for one in rates if isinstance(one, Tensor) and not one.is_cpu]
    if away:
        # One transfer for all rates that are on the device.
        values = iter(torch.stack([one.double() for one in away]).tolist())
        rates = [next(values) if any(one is other for other in away) else one for one in rates]
    for number, rate in enumerate(rates, 1):
        if rate is not None and not 0 <= rate < math.inf:
            raise (InputError if math.isfinite(rate) else NonFiniteError)(
                f"the learning rate of step {step} is {float(rate):g} (parameter group {number} of "
                f"{len(rates)}), so the step was not taken: it must be finite and at least 0; check "
                "Workload(schedule=…) and Workload(optimizer=…)"
            )
    return float(rates[0] or 0.0)
