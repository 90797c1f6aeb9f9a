"""The gradients of a window: added up in float32 at least, measured, scaled, and let go of.

Gradients of bf16 and fp16 parameters do not add up in their own precision: 1024 times 1/1024 is 0.25 in bf16.
Each is taken over into a float32 sum the moment that a backward pass has finished it, and only the sum of the
window is rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

LOW_PRECISION = (torch.bfloat16, torch.float16)


Optimizers = tuple[torch.optim.Optimizer, ...]


class Gradients:
    """What the backward passes of a window leave behind.

    Args:
        model: its parameters may get gradients that no optimizer reads; they are freed with the others.
        optimizers: the groups are read anew for every window, so that a schedule may unfreeze parameters.
    """

    def __init__(self, model: nn.Module, optimizers: Optimizers) -> None:
        self._optimizers = optimizers
        trained = {id(p) for p in _parameters(optimizers)}
        self._others = [p for p in model.parameters() if id(p) not in trained]
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._has_low_precision = any(p.dtype in LOW_PRECISION for p in _parameters(optimizers))

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Inside, backward passes add up; the hooks that do it are gone afterwards."""
        if not self._has_low_precision:
            yield
            return
        hooks = [
            parameter.register_post_accumulate_grad_hook(self._take_over)  # type: ignore[no-untyped-call]
            for parameter in {id(p): p for p in _parameters(self._optimizers)}.values()
            if parameter.dtype in LOW_PRECISION and parameter.requires_grad
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def by_optimizer(self) -> list[list[Tensor]]:
        """The window's gradients as each optimizer will read them, in float32 at least; each once."""
        known: set[int] = set()
        found: list[list[Tensor]] = []
        for optimizer in self._optimizers:
            own: list[Tensor] = []
            for parameter in _parameters((optimizer,)):
                gradient = self._sums.get(parameter, parameter.grad) if self._sums else parameter.grad
                if gradient is not None and id(gradient) not in known:
                    known.add(id(gradient))
                    own.append(gradient)
            found.append(own)
        return found

    def write_back(self) -> None:
        """Put the float32 sums where the optimizers look, each rounded once."""
        while self._sums:
            parameter, total = self._sums.popitem()
            parameter.grad = total.to(parameter.dtype)

    def clear(self) -> None:
        """Free all gradients."""
        self._sums.clear()
        for parameter in _parameters(self._optimizers):
            parameter.grad = None
        for parameter in self._others:
            parameter.grad = None

    def _take_over(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        total = self._sums.get(parameter)
        if total is None:
            self._sums[parameter] = gradient.float()
        else:
            total.add_(gradient)


def norm_of(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all gradients together, as a 0-d tensor: not finite if one element is not."""
    dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    norms = torch._foreach_norm(dense)
    first = norms[0]
    if any(n.dtype != first.dtype or n.device != first.device for n in norms):
        norms = tuple(n.to(first.device, torch.float64) for n in norms)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def _parameters(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[nn.Parameter]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]
