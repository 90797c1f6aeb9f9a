"""Whole numbers that keep their values in a trace: the lengths, indices and masks of a real batch.

Fakes have no values. The memory of some steps depends on those of whole numbers: packed sequences have a row
in each step of time for each sequence that is as long. Torch's fakes can carry a real tensor, and compute
with it if all arguments of an operator carry one. Torch does so for single numbers; here tensors do as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

_PACK = torch.ops.aten._pack_padded_sequence.default
_CTC = torch.ops.aten._ctc_loss.Tensor
MOST_ELEMENTS = 1 << 16
"""Elements up to which a tensor keeps its values: enough for lengths, and quick to compute with."""


@contextmanager
def values_kept() -> Iterator[None]:
    """Let fakes of up to `MOST_ELEMENTS` keep their values within the block."""
    before = fake_tensor.CONSTANT_NUMEL_LIMIT
    fake_tensor.CONSTANT_NUMEL_LIMIT = MOST_ELEMENTS
    try:
        yield
    finally:
        fake_tensor.CONSTANT_NUMEL_LIMIT = before


def fake_with_values(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """Return a fake of whole numbers that has their values; it changes without the tensor."""
    return mode.fake_tensor_converter.from_real_tensor(mode, own_copy(tensor), make_constant=True)


def kernel_of_known(func: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """Return a function with the storages of an operator's kernel whose sizes depend on values.

    Returns:
        None for other operators, and if the values are unknown.
    """
    if func is _PACK and value_of(args[1]) is not None:
        return _packed
    return _aligned if func is _CTC and value_of(args[3]) is not None else None


def _packed(x: Tensor, lengths: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return packed sequences, and the number of them in each step as a real tensor.

    Recurrent layers read it without any operator (ATen/native/PackedSequence.cpp).
    """
    known = value_of(lengths)
    assert known is not None
    with no_dispatch():
        steps = torch.arange(int(known.max()), device=known.device)
        sizes = (known[None, :] > steps[:, None]).sum(1)
        rows = int(known.sum())
    return x.new_empty([rows, *x.shape[2:]]), sizes


def _aligned(log_probs: Tensor, _: Tensor, __: Tensor, lengths: Tensor, *___: Any) -> tuple[Tensor, Tensor]:
    """Return the losses of CTC, and the probabilities that it keeps for its backward pass.

    These have a column for each label of the longest target, and for the blanks around them
    (ATen/native/LossCTC.cpp).
    """
    known = value_of(lengths)
    assert known is not None
    with no_dispatch():
        longest = int(known.max())
    steps, samples, _classes = log_probs.shape
    return log_probs.new_empty([samples]), log_probs.new_empty([samples, steps, 2 * longest + 1])


def own_copy(tensor: Tensor) -> Tensor:
    """Return a real copy of a tensor, past any mode."""
    with no_dispatch():
        return tensor.clone()


def has_values(tensor: Tensor) -> bool:
    """Return whether a real tensor keeps its values: few whole numbers on the host."""
    is_whole = not (tensor.is_floating_point() or tensor.is_complex())
    return is_whole and tensor.layout is torch.strided and tensor.numel() <= MOST_ELEMENTS


def value_of(tensor: Tensor) -> Tensor | None:
    """Return the values of a fake of whole numbers; None if they are unknown."""
    found = tensor.constant if isinstance(tensor, FakeTensor) else None
    return None if found is None or found.is_floating_point() else found
