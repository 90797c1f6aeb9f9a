"""Warm-up (Goyal et al. 2017, arXiv:1706.02677, §2.2), counted in samples: as long for any target batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from autobatch.gradients import Optimizers


def warmup_factor(samples_seen: int, warmup_samples: int | None) -> float:
    """Share of the learning rate for the window that ends after so many samples: it grows in proportion."""
    return 1.0 if warmup_samples is None else min(1.0, samples_seen / warmup_samples)


@contextmanager
def warmed_up(optimizers: Optimizers, factor: float) -> Iterator[None]:
    """Inside, all learning rates are ``factor`` times what they are; schedules never see it."""
    if factor == 1.0:
        yield
        return
    kept = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    try:
        for group, rate in kept:
            group["lr"] = rate * factor
        yield
    finally:
        for group, rate in kept:
            group["lr"] = rate
