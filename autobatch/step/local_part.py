"""The part of a tensor that this process holds: of a sharded tensor that of its rank, else all of it."""

from __future__ import annotations

import torch
from torch import Tensor


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a sharded tensor that this rank holds, in the same memory; else the tensor."""
    # By its method, because the import of the class takes a second.
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    # Autograd would record the call, which takes three times as long.
    with torch.no_grad():
        return to_local()  # type: ignore[no-any-return]


def local_parts(tensors: list[Tensor]) -> list[Tensor]:
    """Return the parts of tensors that this rank holds; see `local_part`."""
    calls = [getattr(one, "to_local", None) for one in tensors]
    if not any(calls):
        return tensors
    with torch.no_grad():
        return [one if call is None else call() for one, call in zip(tensors, calls, strict=True)]


def is_sharded(tensor: Tensor) -> bool:
    """Check whether ranks share a tensor."""
    return hasattr(tensor, "to_local")
