"""The kernel of ``scaled_dot_product_attention`` on a GPU, and the scratch memory of its backward.

The rule is that of ATen/native/transformers/cuda/sdp_utils.cpp (torch 2.13): flash if possible, else
memory-efficient, else the plain formula with its matrix over all pairs. cuDNN's kernel, which newer releases
prefer on capability 9.0 and 10.0, keeps the same tensors as flash. The user's choice by
``torch.nn.attention.sdpa_kernel`` counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

aten = torch.ops.aten
_LOW = (torch.float16, torch.bfloat16)


def attention_kernel(capability: tuple[int, int]) -> Callable[..., Tensor]:
    """Return the operator that a GPU of this compute capability runs."""

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
        if _can_run_flash(capability, query, key, value, attn_mask):
            q, k, v = (_padded(x, 8) for x in (query, key, value))
            out = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
            return out[..., :head]  # type: ignore[no-any-return]
        if _can_run_efficient(capability, query, key, value, enable_gqa):
            keep = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
            bias = _bias(attn_mask, query, key)
            return aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
                query, key, value, bias, keep, dropout_p, is_causal, scale=scale
            )[0]
        return aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]

    return attend


def backward_scratch_bytes(operator: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes that a flash backward holds beside its results, 0 for any other operator.

    They are the row sums of output times gradient (``softmax_d``) and the fp32 accumulator of the query's
    gradient (``dq_accum``), with lengths rounded up to 128 and heads to 32 (flash_api.cpp, ``mha_bwd``).
    """
    if operator is not aten._scaled_dot_product_flash_attention_backward.default:
        return 0
    batch, heads, length, head = args[1].shape
    rows = -(-length // 128) * 128
    return int(4 * batch * heads * rows + 4 * batch * rows * heads * (-(-head // 32) * 32))


def _can_run_flash(
    capability: tuple[int, int], query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> bool:
    return (
        torch._C._get_flash_sdp_enabled()
        and capability >= (8, 0)
        and mask is None
        and query.dim() == 4
        and query.dtype in _LOW
        and query.dtype == key.dtype == value.dtype
        and query.shape[-1] <= 256
        and query.shape[-1] == value.shape[-1]
    )


def _can_run_efficient(
    capability: tuple[int, int], query: Tensor, key: Tensor, value: Tensor, grouped: bool
) -> bool:
    # Tensor cores need heads of a multiple of 16 bytes. bf16 needs capability 8.0.
    aligned = all(x.shape[-1] * x.element_size() % 16 == 0 for x in (query, value))
    known = query.dtype in (torch.float32, torch.float16) or capability >= (8, 0)
    same_heads = query.dim() == 4 and query.shape[1] == key.shape[1] == value.shape[1]
    return (
        torch._C._get_mem_efficient_sdp_enabled()
        and known
        and same_heads
        and not grouped
        and query.dtype is not torch.float64
        and query.dtype == key.dtype == value.dtype
        and (aligned or query.dtype is torch.float32)
    )


def _padded(x: Tensor, multiple: int) -> Tensor:
    short = -x.shape[-1] % multiple
    return pad(x, (0, short)) if short else x


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return the mask as the kernel reads it: floating, in rows of a multiple of 16, over batch and heads."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), float("-inf"))
    length = key.shape[-2]
    aligned = _padded(mask, 16)[..., :length] if mask.shape[-1] % 16 else mask
    return aligned.expand(query.shape[0], query.shape[1], query.shape[-2], length)
