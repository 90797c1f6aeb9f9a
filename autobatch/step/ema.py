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

from autobatch.core.errors import InputError
from autobatch.step.gradients import is_sharded, local_part, local_parts


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

    def tensors(self) -> list[Tensor]:
        """Return the averages."""
        return [self._averages[p] for p in self._parameters if p in self._averages]

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the weights, without waiting for the device."""
        self._start_missing()
        same = [(a, p) for p, a in self._averages.items() if a.dtype == p.dtype]
        if same:
            averages, weights = (local_parts(list(column)) for column in zip(*same, strict=True))
            torch._foreach_lerp_(averages, weights, 1.0 - self.decay)
        for parameter, average in self._averages.items():
            if average.dtype != parameter.dtype:
                # One at a time: float32 copies of all weights together would raise the peak.
                own = local_part(parameter)
                local_part(average).lerp_(own.to(average.dtype), 1.0 - self.decay)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Replace the model's weights by the averages, rounded to the weights' types, within the block.

        Weights that ranks share are overwritten, and copied before, because FSDP knows them by their memory.
        """
        whole = [(p, p.data, a) for p, a in self._averages.items() if not is_sharded(p)]
        own = [(local_part(p.detach()), local_part(a)) for p, a in self._averages.items() if is_sharded(p)]
        parts = [(weights, weights.clone(), average) for weights, average in own]
        try:
            for parameter, _, average in whole:
                parameter.data = average.to(parameter.dtype)
            for weights, _, average in parts:
                weights.copy_(average)
            yield
        finally:
            for parameter, data, _ in whole:
                parameter.data = data
            for weights, copy, _ in parts:
                weights.copy_(copy)

    def state_dict(self) -> dict[str, Any]:
        """Return the decay and one average per parameter, None for a parameter frozen so far."""
        return {"decay": self.decay, "averages": [self._averages.get(p) for p in self._parameters]}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the averages by those that `state_dict` returned.

        Raises:
            ValueError: the state belongs to other parameters.
        """
        self._averages = {}
        for parameter, saved in zip(self._parameters, state["averages"], strict=True):
            if saved is None:
                continue
            if saved.shape != parameter.shape:
                raise ValueError(
                    f"a parameter has shape {tuple(parameter.shape)}, its saved average {tuple(saved.shape)}"
                )
            self._averages[parameter] = _wide_copy(parameter).copy_(saved)

    def _start_missing(self) -> None:
        for parameter in self._parameters:
            if parameter.requires_grad and parameter not in self._averages:
                self._averages[parameter] = _wide_copy(parameter)


def load_average(average: WeightAverage | None, saved: dict[str, Any] | None) -> None:
    """Load the state of an average from a checkpoint; both are None for runs without ``--ema``.

    Raises:
        InputError: only one of the two exists, or the decays differ.
    """
    asked = None if average is None else average.decay
    found = None if saved is None else saved["decay"]
    if asked != found:
        here, there = ("no --ema" if decay is None else f"--ema {decay:g}" for decay in (asked, found))
        raise InputError(
            f"{here} does not match the resumed run, which used {there}: give the same, or start without "
            "--resume"
        )
    if average is not None and saved is not None:
        average.load_state_dict(saved)


def _wide_copy(parameter: nn.Parameter) -> Tensor:
    """Copy a parameter to float32 at least, in the same layout."""
    return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
