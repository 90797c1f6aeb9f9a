"""The gradients of one batch: accumulated, measured, scaled and freed.

bf16 and fp16 cannot accumulate in their own precision: 1024 times 1/1024 is 0.25 in bf16. So each 16-bit
gradient is added to a float32 sum as soon as a backward pass has finished it. Only the sum over the batch is
rounded. On request they accumulate in the type of the weights, which takes half the memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from autobatch.core.records import GradientDtype

LOW_PRECISION = (torch.bfloat16, torch.float16)
Optimizers = tuple[torch.optim.Optimizer, ...]


class Gradients:
    """The gradients that the backward passes of one batch accumulate.

    Args:
        model: the model. Its parameters may get gradients that no optimizer reads; they are freed too.
        optimizers: their groups are read again for every batch, so that a schedule may unfreeze parameters.
        dtype: type in which the gradients of 16-bit parameters are summed.
    """

    def __init__(self, model: nn.Module, optimizers: Optimizers, *, dtype: GradientDtype = "fp32") -> None:
        self._low = LOW_PRECISION if dtype == "fp32" else ()
        self._optimizers = optimizers
        self._sums: dict[nn.Parameter, Tensor] = {}
        trained = parameters_of(optimizers)
        self._others = [parameter for parameter in model.parameters() if parameter not in trained]
        self._has_sums = any(parameter.dtype in self._low for parameter in trained)

    def summed_apart(self) -> AbstractContextManager[None]:
        """Add 16-bit gradients to float32 sums within the block, by hooks."""
        return self._hooked() if self._has_sums else nullcontext()

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        hooks = [
            parameter.register_post_accumulate_grad_hook(self._add_to_sum)  # type: ignore[no-untyped-call]
            for parameter in parameters_of(self._optimizers)
            if parameter.dtype in self._low and parameter.requires_grad
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _add_to_sum(self, parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if parameter in self._sums:
            self._sums[parameter].add_(gradient)
        else:
            self._sums[parameter] = gradient.float()

    def by_optimizer(self) -> list[list[Tensor]]:
        """Return the gradients of each optimizer, each gradient once, or the sum that it was added to.

        Of a gradient that ranks share, this is the part of this rank.
        """
        known: set[nn.Parameter] = set()
        gradients: list[list[Tensor]] = []
        for optimizer in self._optimizers:
            own = [parameter for parameter in parameters_of((optimizer,)) if parameter not in known]
            known.update(own)
            found = [self._sums.get(p, p.grad) for p in own] if self._sums else [p.grad for p in own]
            gradients.append(local_parts([gradient for gradient in found if gradient is not None]))
        return gradients

    def by_parameter(self) -> list[tuple[nn.Parameter, Tensor | None]]:
        """Return each trained parameter once, with its gradient or sum; None if it has none."""
        return [
            (parameter, self._sums.get(parameter, parameter.grad))
            for parameter in parameters_of(self._optimizers)
        ]

    def new_zeros(self, parameter: nn.Parameter) -> Tensor:
        """Give a parameter without a gradient one of zeros, in the type in which it accumulates."""
        if parameter.dtype in self._low:
            return self._sums.setdefault(parameter, torch.zeros_like(parameter, dtype=torch.float32))
        parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def mark(self) -> object:
        """Return what is another one once anything but a backward pass has written gradients or weights.

        One parameter stands for all. None if none has a gradient.
        """
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if (gradient := parameter.grad) is not None:
                        return parameter._version, id(gradient), gradient._version
        return None

    def round_sums(self) -> None:
        """Round each sum once, into the ``grad`` that its optimizer reads, and free the sum."""
        while self._sums:
            parameter, total = self._sums.popitem()
            parameter.grad = total.to(parameter.dtype)

    def clear(self) -> None:
        """Free all gradients."""
        self._sums.clear()
        for parameter in (*parameters_of(self._optimizers), *self._others):
            parameter.grad = None


def parameters_of(optimizers: Optimizers) -> dict[nn.Parameter, None]:
    """Return the parameters that optimizers train now, each once."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return dict.fromkeys(parameter for group in groups for parameter in group["params"])


def gradient_dtype_of(model: nn.Module, asked: GradientDtype | Literal["auto"]) -> GradientDtype:
    """Return the type in which the gradients of a model are summed: ``fp32`` without 16-bit weights."""
    return "weights" if asked == "weights" and low_precision_parameters(model) else "fp32"


def low_precision_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained parameters with 16 bits."""
    return [p for p in model.parameters() if p.requires_grad and p.dtype in LOW_PRECISION]


def gradient_sum_notes(model: nn.Module, dtype: GradientDtype) -> list[str]:
    """Return a note if gradients are summed in 16 bits, else nothing."""
    if gradient_dtype_of(model, dtype) == "fp32":
        return []
    elements = sum(parameter.numel() for parameter in low_precision_parameters(model))
    return [
        f"the gradients of {elements:,} parameters are summed in 16 bits, which loses small micro-batches "
        "(--gradient-dtype weights)"
    ]


def differentiate(loss: Tensor, weight: float) -> None:
    """Run the backward pass of a loss times a weight, and free all that it took.

    It begins with the weight, where torch would begin with 1: the same gradient as that of the product,
    without the product and its own backward pass. A loss may be a constant if its micro-batch counts nothing.

    ``torch.autograd.backward`` looks for overrides, functorch and wrong shapes, and hands the context of the
    caller to the threads of other devices. On the CPU a step of a small model takes a tenth longer with it,
    and the engine runs in the thread of the caller.
    """
    if not loss.requires_grad:
        return
    # A new one each time, because a gradient may keep its memory.
    begin = torch.full_like(loss, weight)
    engine = getattr(Variable, "_execution_engine", None)
    if engine is not None and type(loss) is Tensor and loss.is_cpu:
        engine.run_backward((loss,), (begin,), False, False, (), allow_unreachable=True, accumulate_grad=True)
    else:
        torch.autograd.backward(loss, begin)


def norm_of(gradients: Sequence[Tensor]) -> Tensor | float:
    """Return the 2-norm of all gradients together, which is finite only if every element is.

    It is a 0-d tensor, or a number if nothing has to wait for it.
    """
    dense = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    # In 16 bits a norm would have 8 or 11 bits, and could overflow.
    is_low = any(gradient.dtype in LOW_PRECISION for gradient in dense)
    norms = torch._foreach_norm(dense, 2, torch.float64 if is_low else None)
    if is_readable(norms[0]) and all(norm.is_cpu for norm in norms):
        return math.hypot(*(norm.item() for norm in norms))
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    return total


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
        return [each.to_local() if is_sharded(each) else each for each in tensors]  # type: ignore[attr-defined]
