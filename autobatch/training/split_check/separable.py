"""Whether the gradient of a sample depends on what the model returns for other samples.

If it does not, although no weights of the parts give the gradient of the whole, then the loss is a sum of
several means: each sample is divided by counts of the batch, and by more than one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autobatch.training.split_check.gradient import GradientRunner
from autobatch.workload.contract import Collated, Loss
from autobatch.workload.nested import map_tensors

NOISE = 3.0
"""Size of the change of what the model returns for the other samples, beside its own."""


def is_separable(runner: GradientRunner, batch: Collated, samples: int) -> bool:
    """Check that the loss treats what the model returns for each sample alone, but for constant factors.

    The outputs of the second half of the samples are changed; the gradients of the first half must not.

    Returns:
        False also if it cannot be told: the loss does not call the model itself, or the model returns
        something else than one row per sample.
    """
    state = torch.get_rng_state()
    found = []
    for noise in (0.0, NOISE):
        torch.set_rng_state(state)
        outputs = _Outputs(samples, noise)
        handle = runner.model.register_forward_hook(outputs)
        try:
            runner.state.put_back()
            loss = runner.loss_of(batch)
            total = loss.total if isinstance(loss, Loss) else loss
            total.backward()  # type: ignore[no-untyped-call]
        except Exception:  # the cause of a fault stays unknown then
            return False
        finally:
            handle.remove()
            runner.model.zero_grad(set_to_none=True)
        found.append(outputs.gradients())
    one, other = found
    if one is None or other is None or one.shape != other.shape or not one.norm():
        return False
    return float((one - other).norm()) <= runner.tolerance * float(one.norm())


class _Outputs:
    """A hook that cuts the outputs of a model off, and changes those of the second half of a batch."""

    def __init__(self, samples: int, noise: float) -> None:
        self._samples = samples
        self._noise = noise
        self._leaves: list[Tensor] = []
        self._is_whole = True

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the outputs as leaves."""
        del module, args
        return map_tensors(output, self._leaf)

    def gradients(self) -> Tensor | None:
        """Return the gradients of the first half of the samples; None if an output has no row per sample."""
        half = self._samples // 2
        found = [leaf.grad[:half].flatten().double() for leaf in self._leaves if leaf.grad is not None]
        return torch.cat(found) if found and self._is_whole else None

    def _leaf(self, output: Tensor) -> Tensor:
        if not output.requires_grad:
            return output
        if not output.dim() or len(output) != self._samples:
            self._is_whole = False
            return output
        leaf = output.detach().clone()
        half = self._samples // 2
        # No random numbers: draws of the loss are recorded, and others would be taken for its own.
        noise = torch.arange(leaf[half:].numel(), device=leaf.device).sin().view_as(leaf[half:])
        leaf[half:] += self._noise * leaf.abs().mean() * noise.to(leaf.dtype)
        self._leaves.append(leaf.requires_grad_())
        return leaf
