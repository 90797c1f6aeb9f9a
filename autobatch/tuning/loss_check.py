"""Check of a configuration's first losses against those of the reference on the same samples."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from autobatch.setup.attempt import TrainSetup, batches_of, on_copies
from autobatch.step.train_step import train_step
from autobatch.workload.contract import Collated
from autobatch.workload.data import load_micro_batch
from autobatch.workload.rng import preserved_random_state, seed_torch

STEPS = 10
MICRO_BATCHES = 2
"""Micro-batches of a step."""
SAMPLES = 8
"""Samples of a micro-batch: enough to see a loss go wrong, and cheap."""
TOLERANCE = 0.02
"""Bound on the mean relative distance of the losses; a model in bf16 stays well below it."""


class LossCheck:
    """A comparison of losses with a short run in fp32 with every knob at its default.

    Args:
        setup: the model and the data.
        micro_batch: the largest that fits, in samples.
    """

    def __init__(self, setup: TrainSetup, micro_batch: int) -> None:
        self._reference_setup = replace(setup, precision="fp32", knobs={})
        self._size = min(SAMPLES, micro_batch)
        self._reference: list[float] | None = None
        self._noise = 0.0

    def over(self, setup: TrainSetup) -> float:
        """Return by how much the relative distance to the reference exceeds the tolerance; at most 1.

        Compiled code draws other random numbers in the forward pass than the model does. So the tolerance is
        at least twice the distance of two runs of the reference with different seeds.

        Raises:
            Exception: whatever running the configuration raises.
        """
        if self._reference is None:
            self._reference = _losses(self._reference_setup, self._size, seed=1)
            self._noise = _distance(self._reference, _losses(self._reference_setup, self._size, seed=2))
        if not all(map(math.isfinite, self._reference)):
            # Nothing can be compared with a reference that does not train.
            return -TOLERANCE
        gap = _distance(self._reference, _losses(setup, self._size, seed=1))
        if not math.isfinite(gap):
            return 1.0
        return min(1.0, gap - max(TOLERANCE, 2 * self._noise))


def _distance(reference: list[float], losses: list[float]) -> float:
    """Return the mean absolute difference ÷ the mean absolute value of the reference."""
    scale = sum(map(abs, reference)) or 1.0
    return sum(abs(a - b) for a, b in zip(reference, losses, strict=True)) / scale


def _losses(setup: TrainSetup, size: int, *, seed: int) -> list[float]:
    """Return the losses of the first steps, on samples that are always the same."""
    draw = torch.Generator().manual_seed(0)
    losses = []
    with preserved_random_state(), setup.device.training() as meter:
        # A copy of a shared model draws its values.
        seed_torch(0)
        with on_copies(setup, meter) as train_state:
            for module in train_state.model.modules():
                if isinstance(module, nn.modules.dropout._DropoutNd):
                    module.eval()
            seed_torch(seed)
            for _ in range(STEPS):
                batches = batches_of(setup, meter, _fetched(setup, size, draw))
                passing = train_state.passing(batches, MICRO_BATCHES)
                losses.append(train_step(train_state, passing, size * MICRO_BATCHES).loss)
            del train_state
    return losses


def _fetched(setup: TrainSetup, size: int, draw: torch.Generator) -> Iterator[tuple[Collated, int]]:
    samples = len(setup.workload.train_data)  # type: ignore[arg-type]
    for _ in range(MICRO_BATCHES):
        ids = torch.randint(samples, (size,), generator=draw, device="cpu").tolist()
        yield load_micro_batch(setup.workload, ids), size
