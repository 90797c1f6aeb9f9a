"""The backward pass of a loss, without the checks that a loss of one step after another does not need."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Variable


def backward_from(loss: Tensor, weight: float) -> None:
    """Run the backward pass of a 0-d loss, which begins with a weight.

    ``Tensor.backward`` looks for overrides, functorch and wrong shapes, and hands the context of the caller
    to the threads of other devices. On the CPU that takes as long as the backward pass of a small layer, and
    the engine runs in the thread of the caller.

    Args:
        loss: a loss that requires a gradient.
        weight: its gradient.
    """
    # A new one each time, because a gradient may keep its memory.
    begin = torch.full_like(loss, weight)
    if type(loss) is Tensor and loss.is_cpu:
        Variable._execution_engine.run_backward(
            (loss,), (begin,), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
    else:
        loss.backward(begin)  # type: ignore[no-untyped-call]
