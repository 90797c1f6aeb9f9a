"""Does a configuration train as the reference does? Asked of the first losses on the same samples."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from autobatch.probing.attempt import Bench, batches_of, open_trainee
from autobatch.step.restore import lent
from autobatch.step.train_step import run_window
from autobatch.workload.contract import Batch
from autobatch.workload.data import join
from autobatch.workload.rng import preserved_random_state

WINDOWS = 10


MICRO_BATCHES = 2


SAMPLES = 8
"""… of a micro-batch: enough to see a loss go wrong, few enough to cost next to nothing."""


TOLERANCE = 0.02
"""Relative, of the mean distance of the losses; a model in bf16 stays well below."""


class LossCheck:
    """Compares the losses of short runs with those of one in fp32 with every knob at its default.

    Args:
        bench: the model and the data.
        micro_batch: what fits, in samples.
    """

    def __init__(self, bench: Bench, micro_batch: int) -> None:
        self._bench = replace(bench, precision="fp32", knobs={})
        self._size = min(SAMPLES, micro_batch)
        self._reference: list[float] | None = None
        self._noise = 0.0

    def over(self, bench: Bench) -> float:
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
        gap = _distance(self._reference, _losses(bench, self._size, seed=1))
        if not math.isfinite(gap):
            return 1.0
        return min(1.0, gap - max(TOLERANCE, 2 * self._noise))


def _distance(reference: list[float], losses: list[float]) -> float:
    """Mean absolute difference ÷ mean absolute value of the reference."""
    scale = sum(map(abs, reference)) or 1.0
    return sum(abs(a - b) for a, b in zip(reference, losses, strict=True)) / scale


def _losses(bench: Bench, size: int, *, seed: int) -> list[float]:
    """The losses of the first windows, on samples that are always the same."""
    draw = torch.Generator().manual_seed(0)
    with (
        preserved_random_state(),
        bench.device.training() as meter,
        lent(bench.model, bench.device.torch_device) as model,
    ):
        trainee = open_trainee(bench, meter)
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.eval()
        torch.manual_seed(seed)
        losses = [
            run_window(
                trainee, batches_of(bench, meter, _fetched(bench, size, draw)), size * MICRO_BATCHES
            ).loss
            for _ in range(WINDOWS)
        ]
        del trainee
    return losses


def _fetched(bench: Bench, size: int, draw: torch.Generator) -> Iterator[tuple[Batch, int]]:
    samples = len(bench.workload.train_data)  # type: ignore[arg-type]
    for _ in range(MICRO_BATCHES):
        ids = torch.randint(samples, (size,), generator=draw).tolist()
        yield join(bench.workload, ids), size
