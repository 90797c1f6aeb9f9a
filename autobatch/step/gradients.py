"""The gradients of one batch: accumulated, measured, scaled and freed.

bf16 and fp16 cannot accumulate in their own precision: 1024 times 1/1024 is 0.25 in bf16. So each 16-bit
gradient is added to a float32 sum as soon as a backward pass has finished it. Only the sum over the batch is
rounded. On request they accumulate in the type of the weights, which takes half the memory.

The backward pass of a CUDA graph writes its gradients to the same memory each time. torch makes the first of
them the ``grad`` of a parameter, and the next micro-batch invalidates it (pytorch#169545). So these gradients
are added to sums of their own, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch
from torch import Tensor, nn

from autobatch.core.records import GradientDtype
from autobatch.core.units import MiB, format_bytes

LOW_PRECISION = (torch.bfloat16, torch.float16)
EXCHANGE_BYTES = 25 * MiB
"""Most bytes of the buffer in which ranks sum their gradients; a bucket of DDP has this size too."""
RANK_CELLS = 80
"""Elements of that buffer for the numbers of each rank, which `autobatch.distributed.reduce` sends along."""
Optimizers = tuple[torch.optim.Optimizer, ...]


class Gradients:
    """The gradients that the backward passes of one batch accumulate.

    Args:
        model: the model. Its parameters may get gradients that no optimizer reads; they are freed too.
        optimizers: their groups are read again for every batch, so that a schedule may unfreeze parameters.
        dtype: type in which the gradients of 16-bit parameters are summed.
        are_overwritten: whether each backward pass overwrites the gradients of the last, as CUDA graphs do.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        *,
        dtype: GradientDtype = "fp32",
        are_overwritten: bool = False,
    ) -> None:
        self.dtype: GradientDtype = dtype
        self.are_overwritten = are_overwritten
        self._optimizers = optimizers
        trained = {id(p) for p in _parameters_of(optimizers)}
        self._others = [p for p in model.parameters() if id(p) not in trained]
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._has_sums = any(self._has_sum(parameter) for parameter in _parameters_of(optimizers))

    def summed_apart(self) -> AbstractContextManager[None]:
        """Add 16-bit and overwritten gradients to sums of their own within the block, by hooks."""
        return self._hooked() if self._has_sums else nullcontext()

    def _has_sum(self, parameter: nn.Parameter) -> bool:
        return self.are_overwritten or self._sum_dtype(parameter) != parameter.dtype

    def _sum_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        return torch.float32 if self.dtype == "fp32" and parameter.dtype in LOW_PRECISION else parameter.dtype

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        hooks = [
            parameter.register_post_accumulate_grad_hook(self._add_to_sum)  # type: ignore[no-untyped-call]
            for parameter in {id(p): p for p in _parameters_of(self._optimizers)}.values()
            if self._has_sum(parameter) and parameter.requires_grad
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def by_optimizer(self) -> list[list[Tensor]]:
        """Return the gradients of each optimizer, each gradient once, or the sum that it was added to.

        Of a gradient that ranks share, this is the part of this rank.
        """
        known: set[int] = set()
        found: list[list[Tensor]] = []
        for optimizer in self._optimizers:
            own: list[Tensor] = []
            for parameter in _parameters_of((optimizer,)):
                gradient = self._sums.get(parameter, parameter.grad) if self._sums else parameter.grad
                if gradient is not None and id(gradient) not in known:
                    known.add(id(gradient))
                    own.append(gradient)
            found.append(local_parts(own))
        return found

    def by_parameter(self) -> list[tuple[nn.Parameter, Tensor | None]]:
        """Return each trained parameter once, with its gradient or sum; None if it has none."""
        parameters = {id(p): p for p in _parameters_of(self._optimizers)}.values()
        return [(p, self._sums.get(p, p.grad)) for p in parameters]

    def new_zeros(self, parameter: nn.Parameter) -> Tensor:
        """Give a parameter without a gradient one of zeros, in the type in which it accumulates."""
        if self._sum_dtype(parameter) != parameter.dtype:
            self._sums[parameter] = torch.zeros_like(parameter, dtype=self._sum_dtype(parameter))
            return self._sums[parameter]
        parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def round_sums(self) -> None:
        """Round each sum once, into the ``grad`` that its optimizer reads, and free the sum."""
        while self._sums:
            parameter, total = self._sums.popitem()
            parameter.grad = total.to(parameter.dtype)

    def clear(self) -> None:
        """Free all gradients."""
        self._sums.clear()
        for parameter in _parameters_of(self._optimizers):
            parameter.grad = None
        for parameter in self._others:
            parameter.grad = None

    def _add_to_sum(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        total = self._sums.get(parameter)
        if total is None:
            self._sums[parameter] = gradient.to(self._sum_dtype(parameter), copy=True)
        else:
            total.add_(gradient)


def gradient_dtype_of(model: nn.Module, asked: GradientDtype | Literal["auto"]) -> GradientDtype:
    """Return the type in which the gradients of a model are summed: ``fp32`` without 16-bit weights."""
    return "weights" if asked == "weights" and low_precision_parameters(model) else "fp32"


def low_precision_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained parameters with 16 bits."""
    return [p for p in model.parameters() if p.requires_grad and p.dtype in LOW_PRECISION]


def gradient_sum_notes(model: nn.Module, dtype: GradientDtype) -> list[str]:
    """Return a note on the memory of gradient sums if 16-bit parameters are trained, else nothing."""
    elements = sum(parameter.numel() for parameter in low_precision_parameters(model))
    if not elements:
        return []
    how, takes = "in float32", "because 16-bit sums lose small micro-batches"
    if dtype == "weights":
        how, takes = "in 16 bits", "and loses small micro-batches (--gradient-dtype weights)"
    size = format_bytes(elements * (2 if dtype == "weights" else 4))
    return [
        f"{elements:,} parameters have 16 bits: their gradients are summed {how}, which takes {size}, {takes}"
    ]


def norm_of(gradients: Sequence[Tensor]) -> Tensor | float:
    """Return the 2-norm of all gradients together, which is finite only if every element is.

    It is a 0-d tensor, or a number if nothing has to wait for it.
    """
    low: list[Tensor] = []
    others: list[Tensor] = []
    for gradient in gradients:
        dense = gradient.coalesce().values() if gradient.is_sparse else gradient
        (low if dense.dtype in LOW_PRECISION else others).append(dense)
    norms = torch._foreach_norm(others) if others else ()
    if low:
        # In 16 bits a norm would have 8 or 11 bits, and could overflow.
        norms = (*norms, *torch._foreach_norm(low, 2, torch.float32))
    if is_readable(norms[0]) and all(norm.is_cpu for norm in norms):
        return math.hypot(*(norm.item() for norm in norms))
    first = norms[0]
    if len({(norm.dtype, norm.device) for norm in norms}) > 1:
        norms = tuple(n.to(first.device, torch.float64) for n in norms)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def is_readable(value: Tensor) -> bool:
    """Check whether the host may read a value at once, in place of further arithmetic on the device.

    Within a dispatch mode it may not: what is traced and counted is the arithmetic of a device, so that the
    memory of a probe is that of its prediction to a byte.
    """
    return type(value) is Tensor and value.is_cpu and not torch._C._len_torch_dispatch_stack()


def is_sharded(tensor: Tensor) -> bool:
    """Check whether ranks share a tensor."""
    # By its method, because the import of the class takes a second.
    return hasattr(tensor, "to_local")


def local_parts(tensors: list[Tensor]) -> list[Tensor]:
    """Return the parts of sharded tensors that this rank holds, in the same memory; others as they are."""
    if not any(map(is_sharded, tensors)):
        return tensors
    with torch.no_grad():  # autograd would record the call, which takes three times as long
        return [one.to_local() if is_sharded(one) else one for one in tensors]  # type: ignore[attr-defined]


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of one tensor that this rank holds; see `local_parts`."""
    return local_parts([tensor])[0]


def exchange_buffer(parameters: Sequence[nn.Parameter], device: torch.device, *, world: int) -> Tensor:
    """Return the buffer in which ranks sum their gradients: all of them, or as many as it may hold."""
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32
    elements = min(sum(p.numel() for p in parameters), EXCHANGE_BYTES // dtype.itemsize)
    return torch.zeros(elements + len(parameters) + RANK_CELLS * world, dtype=dtype, device=device)


def _parameters_of(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[nn.Parameter]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]
