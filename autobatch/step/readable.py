"""Figures that the host reads at once, because no device computes them and nothing counts their memory."""

from __future__ import annotations

import torch
from torch import Tensor


def is_readable(figure: Tensor) -> bool:
    """Check whether the host may read a figure at once, in place of further arithmetic on the device.

    Within a dispatch mode it may not: what is traced and counted is the arithmetic of a device, so that the
    memory of a probe is that of its prediction to a byte.
    """
    return type(figure) is Tensor and figure.is_cpu and not torch._C._len_torch_dispatch_stack()
