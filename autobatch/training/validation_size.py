"""The validation micro-batch, which adapts to what fits."""

from __future__ import annotations

import math

MOST_GROWTH = 2
"""Most validation samples at once, in training micro-batches."""


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
