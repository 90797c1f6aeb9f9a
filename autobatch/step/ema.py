"""An exponential moving average (EMA) of the weights, kept beside the weights that train.

After every optimizer step ``a ← a + (1 - decay) · (w - a)`` (``torch.optim.swa_utils.get_ema_multi_avg_fn``).
Averages are kept in float32 at least, because bf16 would lose an update of 0.001 on a weight of 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from autobatch.step.gradients import local_parts


class WeightAverage:
    """The averages of trained parameters, each starting at its weight.

    Buffers are not averaged: running statistics are averages already. A frozen parameter costs nothing; its
    average starts at the first step that finds it unfrozen.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float) -> None:
        self.decay = decay
        self._parameters = list(parameters)
        self._averages: dict[nn.Parameter, Tensor] = {}
        self._start_missing()

    def _start_missing(self) -> None:
        for parameter in self._parameters:
            if parameter.requires_grad and parameter not in self._averages:
                self._averages[parameter] = _wide_copy(parameter)

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the weights, without waiting for the device."""
        self._start_missing()
        move = get_ema_multi_avg_fn(self.decay)  # type: ignore[no-untyped-call]
        averages, weights = local_parts([*self._averages.values()]), local_parts([*self._averages])
        same = [pair for pair in zip(averages, weights, strict=True) if pair[0].dtype == pair[1].dtype]
        if same:
            move(*map(list, zip(*same, strict=True)), 0)
        for average, weight in zip(averages, weights, strict=True):
            if average.dtype != weight.dtype:
                # One at a time: float32 copies of all weights together would raise the peak.
                move([average], [weight.to(average.dtype)], 0)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Replace the values of the weights by the averages, rounded to their types, within the block."""
        weights = local_parts([parameter.detach() for parameter in self._averages])
        saved = [weight.clone() for weight in weights]
        try:
            for weight, average in zip(weights, local_parts([*self._averages.values()]), strict=True):
                weight.copy_(average)
            yield
        finally:
            for weight, value in zip(weights, saved, strict=True):
                weight.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """Return the decay and one average per parameter, None for a parameter frozen so far."""
        return {"decay": self.decay, "averages": [self._averages.get(p) for p in self._parameters]}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the averages by those that `state_dict` returned for the same parameters."""
        pairs = zip(self._parameters, state["averages"], strict=True)
        self._averages = {p: _wide_copy(p).copy_(saved) for p, saved in pairs if saved is not None}


def _wide_copy(parameter: nn.Parameter) -> Tensor:
    """Copy a parameter to float32 at least, in the same layout."""
    return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
