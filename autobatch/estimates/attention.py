"""The kernel of ``scaled_dot_product_attention`` on a GPU.

The rule is that of ATen/native/transformers/cuda/sdp_utils.cpp (torch 2.13): flash, else memory-efficient,
else the plain formula with its matrix over all pairs. The user's choice by ``torch.nn.attention.sdpa_kernel``
counts. Some versions of torch prefer cuDNN on some GPUs, which keeps as much.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

aten = torch.ops.aten
Capability = tuple[int, int]
Kernel = Literal["flash", "efficient", "math"]
_LOW = (torch.float16, torch.bfloat16)
GENERATIONS: tuple[Capability, ...] = ((7, 0), (8, 0))
"""First compute capabilities of the GPUs that may run different kernels."""


class Attention(NamedTuple):
    """A call of attention, as far as it decides on the kernel."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    is_grouped: bool

    def kernel_on(self, capability: Capability) -> Kernel:
        """Return the kernel that a GPU of this compute capability runs."""
        if self._is_dense() and self._runs_on_flash(capability):
            return "flash"
        return "efficient" if self._is_dense() and self._runs_on_efficient(capability) else "math"

    def _is_dense(self) -> bool:
        """Return whether the tensors have four dimensions, and one batch size and one type."""
        return (
            self.query.dim() == 4
            and len({x.shape[0] for x in self[:3]}) == len({x.dtype for x in self[:3]}) == 1
        )

    def _runs_on_flash(self, capability: Capability) -> bool:
        head = self.query.shape[-1]
        return (
            torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
            and capability >= (8, 0)
            and self.mask is None
            and self.query.dtype in _LOW
            and head <= 256
            and head == self.value.shape[-1]
            and (self.query.shape[-2] == self.key.shape[-2] or not self.is_causal)
        )

    def _runs_on_efficient(self, capability: Capability) -> bool:
        dtype = self.query.dtype
        # Tensor cores need heads of a multiple of 16 bytes, and take fp32 from 8.0 on, as bf16.
        is_aligned = all(x.shape[-1] * x.element_size() % 16 == 0 for x in (self.query, self.value))
        return (
            torch.backends.cuda.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call]
            and (dtype in (torch.float32, torch.float16) or (dtype in _LOW and capability >= (8, 0)))
            and len({x.shape[1] for x in self[:3]}) == 1
            and not self.is_grouped
            and (is_aligned or (dtype is torch.float32 and capability < (8, 0)))
        )


def attention_operator(capability: Capability) -> Callable[..., Tensor]:
    """Return the operator that runs the kernel of a GPU of this compute capability."""

    def attend(  # noqa: PLR0917 - the operator's own signature
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        head = query.shape[-1]
        scale = head**-0.5 if scale is None else scale
        kernel = Attention(query, key, value, attn_mask, is_causal, enable_gqa).kernel_on(capability)
        found: Any
        if kernel == "flash":
            q, k, v = (_padded(x, 8) for x in (query, key, value))
            found = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)
            return found[0][..., :head]  # type: ignore[no-any-return]
        if kernel == "math":
            found = aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
            )
            return found[0]  # type: ignore[no-any-return]
        mask = _aligned(_floating(attn_mask, query.dtype), query, key)
        may_learn = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        found = aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, may_learn, dropout_p, is_causal, scale=scale
        )
        return found[0]  # type: ignore[no-any-return]

    return attend


def _padded(x: Tensor, multiple: int) -> Tensor:
    short = -x.shape[-1] % multiple
    return pad(x, (0, short)) if short else x


def _aligned(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return a mask in rows of a multiple of 16 numbers, over batch and heads."""
    if mask is None:
        return None
    length = key.shape[-2]
    return _padded(mask, 16)[..., :length].expand(*query.shape[:-1], length)


def _floating(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype is not torch.bool:
        return mask
    seen, hidden = (torch.scalar_tensor(one, dtype=dtype, device=mask.device) for one in (0.0, -torch.inf))
    return torch.where(mask, seen, hidden)
