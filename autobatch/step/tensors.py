"""Questions of a step about one tensor: may the host read it at once, and which part of it is here."""

from __future__ import annotations

import torch
from torch import Tensor


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
