"""Which samples an optimizer step takes, and in which order.

Windows of exactly ``target_batch`` sample ids are drawn first, from a permutation of each epoch that depends
on the seed and the epoch alone, and split afterwards: the order of the data does not depend on the
micro-batch, on the number of workers, on the ranks or on where a run was resumed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

LastBatch = Literal["carry", "flush", "drop"]


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The samples of one optimizer step, over all ranks."""

    index: int
    """Number of the window in the run, from 0."""
    epoch: int
    """Epoch that the first sample belongs to, from 0."""
    ids: list[int]


@dataclass(frozen=True, kw_only=True)
class GlobalBatchSampler:
    """All windows of a run, as arithmetic: any of them can be found without drawing those before it."""

    samples: int
    """Samples of the training data."""
    target_batch: int
    seed: int
    steps: int | None = None
    """Optimizer steps to run; where both are given, the fewer."""
    epochs: int | None = None
    last_batch: LastBatch = "carry"

    @property
    def total(self) -> int:
        """Windows of the whole run."""
        if self.epochs is None:
            return self.steps or 0
        if self.last_batch == "carry":
            windows = math.ceil(self.epochs * self.samples / self.target_batch)
        else:
            windows = self.epochs * self._an_epoch
        return windows if self.steps is None else min(windows, self.steps)

    @property
    def _an_epoch(self) -> int:
        """Windows an epoch where windows do not run over its end."""
        if self.last_batch == "drop":
            return self.samples // self.target_batch
        return math.ceil(self.samples / self.target_batch)

    def size(self, index: int) -> int:
        """Samples of a window: the target, or fewer where the data of a window ends."""
        if self.last_batch == "carry":
            end = None if self.epochs is None else self.epochs * self.samples
            return (
                self.target_batch if end is None else min(self.target_batch, end - index * self.target_batch)
            )
        place = index % self._an_epoch
        return min(self.target_batch, self.samples - place * self.target_batch)

    def seen(self, index: int) -> int:
        """Samples taken before a window."""
        if self.last_batch == "carry":
            return min(index * self.target_batch, (self.epochs or math.inf) * self.samples)  # type: ignore[return-value]
        epochs, place = divmod(index, self._an_epoch)
        whole = self.samples if self.last_batch == "flush" else self._an_epoch * self.target_batch
        return epochs * whole + place * self.target_batch

    def batches(self, start: int = 0) -> Iterator[GlobalBatch]:
        """Draw the windows of the run from number ``start`` on."""
        order: list[int] = []
        drawn = -1
        for index in range(start, self.total):
            first = self._position(index)
            ids: list[int] = []
            missing = self.size(index)
            while missing:
                epoch, place = divmod(first + len(ids), self.samples)
                if epoch != drawn:
                    order, drawn = permutation(self.samples, seed=self.seed, epoch=epoch), epoch
                ids += order[place : place + missing]
                missing = self.size(index) - len(ids)
            yield GlobalBatch(index, first // self.samples, ids)

    def _position(self, index: int) -> int:
        """Where a window begins on the line of all epochs."""
        if self.last_batch == "carry":
            return index * self.target_batch
        epoch, place = divmod(index, self._an_epoch)
        return epoch * self.samples + place * self.target_batch


def permutation(samples: int, *, seed: int, epoch: int) -> list[int]:
    """The order of an epoch: a permutation of ``range(samples)`` that depends on seed and epoch alone."""
    generator = torch.Generator()
    # Epochs of neighbouring seeds must not coincide: seed and epoch go through an odd multiplier each
    # (Steele et al. 2014, SplitMix64).
    mixed = (seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9 + 1) % 2**63
    generator.manual_seed(mixed)
    order: list[int] = torch.randperm(samples, generator=generator).tolist()
    return order
