"""The kernel of ``scaled_dot_product_attention`` on a GPU, and the scratch memory of its backward pass.

The rule is that of ATen/native/transformers/cuda/sdp_utils.cpp (torch 2.13): cuDNN on GPUs that it is made
for, else flash, else memory-efficient, else the plain formula with its matrix over all pairs. The user's
choice by ``torch.nn.attention.sdpa_kernel`` counts. The workspace of cuDNN is not public, so that of flash is
taken.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

aten = torch.ops.aten
_LOW = (torch.float16, torch.bfloat16)
_CUDNN_CAPABILITIES = ((9, 0), (10, 0), (10, 3))
_CUDNN_ABOVE = 91500
"""The version of cuDNN above which torch prefers its attention (``check_prefer_cudnn_attention``)."""


class _Call(NamedTuple):
    """A call of attention, as far as it decides on the kernel."""

    capability: tuple[int, int]
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    is_causal: bool
    is_grouped: bool

    @property
    def head(self) -> int:
        """Features of a head."""
        return self.query.shape[-1]

    @property
    def is_dense(self) -> bool:
        """True if the tensors have four dimensions, and one batch size and one type."""
        tensors = (self.query, self.key, self.value)
        return (
            self.query.dim() == 4
            and len({x.shape[0] for x in tensors}) == len({x.dtype for x in tensors}) == 1
        )

    @property
    def needs_gradient(self) -> bool:
        """True if a backward pass may follow."""
        return torch.is_grad_enabled() and any(x.requires_grad for x in (self.query, self.key, self.value))


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
        call = _Call(capability, query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        if _can_run_cudnn(call):
            bias = _floating(attn_mask, query.dtype)
            return aten._scaled_dot_product_cudnn_attention(  # type: ignore[no-any-return]
                query, key, value, bias, call.needs_gradient, dropout_p, is_causal, scale=scale
            )[0]
        if _can_run_flash(call):
            q, k, v = (_padded(x, 8) for x in (query, key, value))
            out = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
            return out[..., :head]  # type: ignore[no-any-return]
        if _can_run_efficient(call):
            bias = _bias(attn_mask, query, key)
            return aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
                query, key, value, bias, call.needs_gradient, dropout_p, is_causal, scale=scale
            )[0]
        return aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]

    return attend


def flash_scratch(query: Tensor, key: Tensor) -> list[int]:
    """Return the scratch of flash's backward (flash_api.cpp, ``mha_bwd``).

    That is the row sums of output times gradient (``softmax_d``) and the fp32 accumulator of the query's
    gradient (``dq_accum``), with lengths rounded up to 128 and heads to 32. If several heads share a key, the
    gradients of keys and values are kept for each (``dk_expanded``, ``dv_expanded``).
    """
    batch, heads, length, head = query.shape
    rows = _up(length, 128)
    shared = [batch * heads * key.shape[2] * head * query.element_size()] * 2 * (key.shape[1] != heads)
    return [4 * batch * heads * rows, 4 * batch * rows * heads * _up(head, 32), *shared]


def efficient_scratch(query: Tensor) -> tuple[int, int]:
    """Return the scratch of the memory-efficient backward (attention_backward.cu, kernel_backward.h).

    That is the row sums of output times gradient (``delta``), and a workspace with an fp32 accumulator for
    all tiles of 64 rows of the query's gradient, and for one tile of those of key and value if a 16-bit head
    does not fit in registers.
    """
    batch, heads, length, head = query.shape
    rows, columns = _up(length, 64), _up(head, 64)
    is_in_registers = query.dtype is torch.float32 or head <= 64
    workspace = rows * columns + 4 * rows // 64 + (0 if is_in_registers else 2 * 64 * columns)
    return 4 * batch * heads * length, 4 * batch * heads * workspace


def _can_run_cudnn(call: _Call) -> bool:
    cudnn = torch.backends.cudnn
    version = cudnn.version() if cudnn.is_available() else None  # type: ignore[no-untyped-call]
    return (
        call.capability in _CUDNN_CAPABILITIES
        and call.dropout == 0
        and torch._C._get_cudnn_sdp_enabled()
        and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
        and (version is None or version > _CUDNN_ABOVE)
        and call.is_dense
        and call.query.dtype in _LOW
        and call.head % 8 == 0
        and call.head <= 128
        and call.head == call.value.shape[-1]
    )


def _can_run_flash(call: _Call) -> bool:
    # A backward pass of large heads does not fit on consumer GPUs.
    is_consumer = (8, 6) <= call.capability <= (8, 9) or call.capability >= (12, 0)
    is_large = 192 < call.head <= 224 or (call.head > 224 and call.dropout > 0)
    is_square = call.query.shape[-2] == call.key.shape[-2]
    return (
        torch._C._get_flash_sdp_enabled()
        and call.capability >= (8, 0)
        and call.mask is None
        and call.is_dense
        and call.query.dtype in _LOW
        and call.head <= 256
        and call.head == call.value.shape[-1]
        and (is_square or not call.is_causal)
        and not (is_consumer and is_large and call.needs_gradient)
    )


def _can_run_efficient(call: _Call) -> bool:
    query = call.query
    # Tensor cores need heads of a multiple of 16 bytes, and take fp32 from 8.0 on, as bf16.
    aligned = all(x.shape[-1] * x.element_size() % 16 == 0 for x in (query, call.value))
    has_type = query.dtype in (torch.float32, torch.float16) or call.capability >= (8, 0)
    return (
        torch._C._get_mem_efficient_sdp_enabled()
        and has_type
        and call.is_dense
        and query.shape[1] == call.key.shape[1] == call.value.shape[1]
        and not call.is_grouped
        and query.dtype is not torch.float64
        and (aligned or (query.dtype is torch.float32 and call.capability < (8, 0)))
    )


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _padded(x: Tensor, multiple: int) -> Tensor:
    short = -x.shape[-1] % multiple
    return pad(x, (0, short)) if short else x


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return the mask as the kernel reads it: floating, in rows of a multiple of 16, over batch and heads."""
    mask = _floating(mask, query.dtype)
    if mask is None:
        return None
    length = key.shape[-2]
    aligned = _padded(mask, 16)[..., :length] if mask.shape[-1] % 16 else mask
    return aligned.expand(query.shape[0], query.shape[1], query.shape[-2], length)


def _floating(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype is not torch.bool:
        return mask
    seen, hidden = (
        torch.scalar_tensor(value, dtype=dtype, device=mask.device) for value in (0.0, float("-inf"))
    )
    return torch.where(mask, seen, hidden)
