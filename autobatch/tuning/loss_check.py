"""Does a configuration train as the reference does? Asked of the first losses on the same samples."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from autobatch.probing.attempt import TrainSetup, batches_of, open_train_state
from autobatch.step.restore import temporary_weights
from autobatch.step.train_step import train_step
from autobatch.workload.contract import Collated
from autobatch.workload.data import load_micro_batch
from autobatch.workload.rng import preserved_random_state

BATCHES = 10


MICRO_BATCHES = 2


SAMPLES = 8
"""… of a micro-batch: enough to see a loss go wrong, few enough to cost next to nothing."""


TOLERANCE = 0.02
"""Relative, of the mean distance of the losses; a model in bf16 stays well below."""


class LossCheck:
    """Compares the losses of short runs with those of one in fp32 with every knob at its default.

    Args:
        setup: the model and the data.
        micro_batch: what fits, in samples.
    """

    def __init__(self, setup: TrainSetup, micro_batch: int) -> None:
        self._bench = replace(setup, precision="fp32", knobs={})
        self._size = min(SAMPLES, micro_batch)
        self._reference: list[float] | None = None
        self._noise = 0.0

    def over(self, setup: TrainSetup) -> float:
        """By how much the relative distance to the reference is over what is tolerated; at most 1.

        What a model draws at random in its forward pass is drawn differently by compiled code: twice the
        distance of two runs of the reference with different seeds is always tolerated.

        Raises:
            Exception: whatever running the configuration raises.
        """
        if self._reference is None:
            self._reference = _losses(self._bench, self._size, seed=1)
            self._noise = _distance(self._reference, _losses(self._bench, self._size, seed=2))
        if not all(map(math.isfinite, self._reference)):
            # A reference that does not train says nothing about others.
            return -TOLERANCE
        gap = _distance(self._reference, _losses(setup, self._size, seed=1))
        if not math.isfinite(gap):
            return 1.0
        return min(1.0, gap - max(TOLERANCE, 2 * self._noise))


def _distance(reference: list[float], losses: list[float]) -> float:
    """Mean absolute difference ÷ mean absolute value of the reference."""
    scale = sum(map(abs, reference)) or 1.0
    return sum(abs(a - b) for a, b in zip(reference, losses, strict=True)) / scale


def _losses(setup: TrainSetup, size: int, *, seed: int) -> list[float]:
    """The losses of the first windows, on samples that are always the same."""
    draw = torch.Generator().manual_seed(0)
    with (
        preserved_random_state(),
        setup.device.training() as meter,
        temporary_weights(setup.model, setup.device.torch_device) as model,
    ):
        train_state = open_train_state(setup, meter)
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.eval()
        torch.manual_seed(seed)
        losses = [
            train_step(
                train_state, batches_of(setup, meter, _fetched(setup, size, draw)), size * MICRO_BATCHES
            ).loss
            for _ in range(BATCHES)
        ]
        del train_state
    return losses


def _fetched(setup: TrainSetup, size: int, draw: torch.Generator) -> Iterator[tuple[Collated, int]]:
    samples = len(setup.workload.train_data)  # type: ignore[arg-type]
    for _ in range(MICRO_BATCHES):
        ids = torch.randint(samples, (size,), generator=draw).tolist()
        yield load_micro_batch(setup.workload, ids), size
