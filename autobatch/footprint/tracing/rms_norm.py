"""CUDA's RMS norm for fakes of CPU tensors: one kernel, which keeps its input and one number per row.

The CPU has no such kernel and runs six operators, which keep five times as much for the backward pass. CUDA's
rule is that of ``rms_norm_symint`` in ATen/native/layer_norm.cpp (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _FusedRmsNorm(torch.autograd.Function):
    """The allocations of ``_fused_rms_norm`` and of its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dimensions: int) -> Tensor:
        rows = x.shape[: x.dim() - dimensions] + (1,) * dimensions
        dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        ctx.save_for_backward(x, weight, torch.empty(rows, dtype=dtype, device=x.device))
        return out

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, _ = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        of_x = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
        of_weight = torch.empty_like(weight) if needs_weight and weight is not None else None
        return of_x, of_weight, None


def rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Run CUDA's kernel, or the operators that replace it if the types of input and weight differ."""
    if x.is_complex() or (weight is not None and weight.dtype != x.dtype):
        return _composed(x, normalized_shape, weight, eps)
    fused: Tensor = _FusedRmsNorm.apply(x, weight, len(normalized_shape))  # type: ignore[no-untyped-call]
    return fused


def _composed(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None) -> Tensor:
    """Run ``rms_norm_composite``: in float32 at least, and back in the type of the input."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32)) if x.is_floating_point() else x
    dimensions = list(range(-len(normalized_shape), 0))
    least = torch.finfo(wide.dtype.to_real()).eps if eps is None else eps
    result = wide * (wide.pow(2).mean(dimensions, keepdim=True) + least).rsqrt()
    return (result if weight is None else result * weight).to(x.dtype)
