"""The samples of each optimizer step, and their order.

Batches of exactly ``target_batch`` sample ids are drawn from a permutation of each epoch, which depends on
the seed and the epoch alone. They are split into micro-batches afterwards. The order of the data therefore
does not depend on the micro-batch, the number of workers, the ranks, or the step of a resume.
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
    """Number of the batch in the run, from 0."""
    epoch: int
    """Epoch of the first sample, from 0."""
    ids: list[int]


@dataclass(frozen=True, kw_only=True)
class GlobalBatchSampler:
    """The batches of a run. Any batch can be found without drawing those before it."""

    samples: int
    """Number of samples in the training data."""
    target_batch: int
    seed: int
    steps: int | None = None
    """Optimizer steps of the run; None for no limit. The run ends at the smaller of ``steps`` and
    ``epochs``."""
    epochs: int | None = None
    """Passes over the data; None for no limit."""
    last_batch: LastBatch = "carry"
    """Samples that an epoch leaves over: ``carry`` them into the next epoch, ``flush`` them as a short batch,
    or ``drop`` them."""

    @property
    def total(self) -> int:
        """Number of batches in the whole run."""
        if self.epochs is None:
            return self.steps or 0
        if self.last_batch == "carry":
            batches = math.ceil(self.epochs * self.samples / self.target_batch)
        else:
            batches = self.epochs * self._per_epoch
        return batches if self.steps is None else min(batches, self.steps)

    @property
    def _per_epoch(self) -> int:
        """Number of batches per epoch if no batch spans two epochs."""
        if self.last_batch == "drop":
            return self.samples // self.target_batch
        return math.ceil(self.samples / self.target_batch)

    def size(self, index: int) -> int:
        """Return the number of samples in a batch: the target, or fewer if the data ends within it."""
        if self.last_batch == "carry":
            end = None if self.epochs is None else self.epochs * self.samples
            return (
                self.target_batch if end is None else min(self.target_batch, end - index * self.target_batch)
            )
        place = index % self._per_epoch
        return min(self.target_batch, self.samples - place * self.target_batch)

    def seen(self, index: int) -> int:
        """Return the number of samples taken before a batch."""
        if self.last_batch == "carry":
            return min(index * self.target_batch, (self.epochs or math.inf) * self.samples)  # type: ignore[return-value]
        epochs, place = divmod(index, self._per_epoch)
        whole = self.samples if self.last_batch == "flush" else self._per_epoch * self.target_batch
        return epochs * whole + place * self.target_batch

    def batches(self, start: int = 0) -> Iterator[GlobalBatch]:
        """Draw the batches of the run, from number ``start`` on."""
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
        """Return where a batch begins, counted in samples of all epochs in a row."""
        if self.last_batch == "carry":
            return index * self.target_batch
        epoch, place = divmod(index, self._per_epoch)
        return epoch * self.samples + place * self.target_batch


def permutation(samples: int, *, seed: int, epoch: int) -> list[int]:
    """Return the order of an epoch: a permutation of ``range(samples)``, set by seed and epoch alone."""
    generator = torch.Generator()
    # Epochs of neighbouring seeds must not coincide, so seed and epoch are each multiplied by an odd constant
    # (Steele et al. 2014, SplitMix64).
    mixed = (seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9 + 1) % 2**63
    generator.manual_seed(mixed)
    order: list[int] = torch.randperm(samples, generator=generator).tolist()
    return order
