"""An exponential moving average of the weights (EMA), kept beside the weights that train.

After every optimizer step ``a ← a + (1 - decay) · (w - a)`` (``torch.optim.swa_utils.get_ema_multi_avg_fn``),
in float32 at least: in bf16 a step of 0.001 would be lost on a weight of 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autobatch.core.errors import InputError


class WeightAverage:
    """The averages of trained parameters; each begins as the weight itself.

    Buffers are not averaged: running statistics are averages already. A parameter that does not require a
    gradient yet costs nothing; its average begins with the step that finds it unfrozen.

    Args:
        parameters: what the optimizers train, each once.
        decay: share of the average that stays at a step, between 0 and 1.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float) -> None:
        self.decay = decay
        self._parameters = list(parameters)
        self._averages: dict[nn.Parameter, Tensor] = {}
        self._begin()

    def tensors(self) -> list[Tensor]:
        """The averages."""
        return list(self._averages.values())

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after a step; nothing waits for the device."""
        self._begin()
        same = [(a, p) for p, a in self._averages.items() if a.dtype == p.dtype]
        if same:
            averages, weights = (list(column) for column in zip(*same, strict=True))
            torch._foreach_lerp_(averages, weights, 1.0 - self.decay)
        for parameter, average in self._averages.items():
            if average.dtype != parameter.dtype:
                # One at a time: float32 copies of all of them would be a peak of their own.
                average.lerp_(parameter.to(average.dtype), 1.0 - self.decay)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside, the model holds the averages, rounded to its own types; then its very weights come back."""
        kept = {parameter: parameter.data for parameter in self._averages}
        try:
            for parameter, average in self._averages.items():
                parameter.data = average.to(parameter.dtype)
            yield
        finally:
            for parameter, data in kept.items():
                parameter.data = data

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the decay, and an average a parameter (``None``: frozen so far)."""
        return {"decay": self.decay, "averages": [self._averages.get(p) for p in self._parameters]}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what `state_dict` returned.

        Raises:
            ValueError: it is of other parameters.
        """
        self._averages = {}
        for parameter, saved in zip(self._parameters, state["averages"], strict=True):
            if saved is None:
                continue
            if saved.shape != parameter.shape:
                raise ValueError(f"an average of shape {tuple(saved.shape)} for {tuple(parameter.shape)}")
            self._averages[parameter] = _wide_copy(parameter).copy_(saved)

    def _begin(self) -> None:
        for parameter in self._parameters:
            if parameter.requires_grad and parameter not in self._averages:
                self._averages[parameter] = _wide_copy(parameter)


def load_average(average: WeightAverage | None, saved: dict[str, Any] | None) -> None:
    """Load an average, and refuse to go on with another one than the run was started with.

    Raises:
        InputError: one of both has none, or the decays differ.
    """
    asked = "no --ema" if average is None else f"--ema {average.decay:g}"
    found = "averages no weights" if saved is None else f"averages its weights with --ema {saved['decay']:g}"
    if (average is None) != (saved is None) or (
        average is not None and saved is not None and average.decay != saved["decay"]
    ):
        raise InputError(
            f"{asked} does not match the run that is resumed, which {found}: give the same, or start "
            "without --resume"
        )
    if average is not None and saved is not None:
        average.load_state_dict(saved)


def _wide_copy(parameter: nn.Parameter) -> Tensor:
    """A copy in float32 at least, in the same layout."""
    return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
