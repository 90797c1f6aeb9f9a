"""CUDA's operator policy for CPU tensors, so that a step traced without a GPU allocates what a GPU would.

Three differences decide on the memory of a step: the lists of autocast (CUDA keeps layer norms, softmax and
losses in fp32, the CPU does not), the kernel of attention, and the mask of dropout. The lists are those of
ATen/autocast_mode.h (torch 2.13); the dispatcher tells which side has a kernel. Optimizers update all
parameters at once. What kernels hold for themselves is not modelled.

The rule of attention is that of ATen/native/transformers/cuda/sdp_utils.cpp (torch 2.13): flash, else
memory-efficient, else the plain formula with its matrix over all pairs. The user's choice by
``torch.nn.attention.sdpa_kernel`` counts. Some versions prefer cuDNN on some GPUs, which keeps as much.

Kernels are replaced for the whole process, so the policy is for short use by one thread. A
``TorchFunctionMode`` is no alternative: it is off inside ``backward``, where checkpoints recompute.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
Capability = tuple[int, int]
Kernel = Literal["flash", "efficient", "math"]
_LOW = (torch.float16, torch.bfloat16)
AMPERE: Capability = (8, 0)
"""The first compute capability with matrix units for bf16 and fp32, whose GPUs run other kernels."""


def attention_kernel(
    capability: Capability,
    tensors: Sequence[Tensor],
    mask: Tensor | None,
    *,
    is_causal: bool,
    is_grouped: bool,
) -> Kernel:
    """Return the kernel that a GPU of this compute capability runs for query, key and value."""
    (query, key, value), cuda = tensors, torch.backends.cuda
    head, dtype, has_bf16 = query.shape[-1], query.dtype, capability >= AMPERE
    if query.dim() != 4 or any(x.shape[0] != query.shape[0] or x.dtype is not dtype for x in tensors):
        return "math"
    if (
        cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
        and has_bf16
        and mask is None
        and dtype in _LOW
        and head <= 256
        and head == value.shape[-1]
        and (query.shape[-2] == key.shape[-2] or not is_causal)
    ):
        return "flash"
    # Tensor cores need heads of a multiple of 16 bytes, and take fp32 from 8.0 on, as bf16.
    is_aligned = all(x.shape[-1] * x.element_size() % 16 == 0 for x in (query, value))
    if (
        cuda.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call]
        and (dtype in (torch.float32, torch.float16) or (dtype in _LOW and has_bf16))
        and len({x.shape[1] for x in tensors}) == 1
        and not is_grouped
        and (is_aligned or (dtype is torch.float32 and not has_bf16))
    ):
        return "efficient"
    return "math"


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
        tensors = query, key, value
        kernel = attention_kernel(capability, tensors, attn_mask, is_causal=is_causal, is_grouped=enable_gqa)
        found: Any
        if kernel == "flash":
            q, k, v = (_padded(x, 8) for x in tensors)
            found = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)
            return found[0][..., :head]  # type: ignore[no-any-return]
        if kernel == "math":
            found = aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
            )
            return found[0]  # type: ignore[no-any-return]
        mask = None if attn_mask is None else _floating_mask(attn_mask, query, key.shape[-2])
        may_learn = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        found = aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, may_learn, dropout_p, is_causal, scale=scale
        )
        return found[0]  # type: ignore[no-any-return]

    return attend


def _padded(x: Tensor, multiple: int) -> Tensor:
    short = -x.shape[-1] % multiple
    return pad(x, (0, short)) if short else x


def _floating_mask(mask: Tensor, query: Tensor, length: int) -> Tensor:
    """Return a mask to add, in rows of a multiple of 16 numbers, over batch and heads."""
    if mask.dtype is torch.bool:
        kept, hidden = (
            torch.scalar_tensor(x, dtype=query.dtype, device=mask.device) for x in (0.0, -torch.inf)
        )
        mask = torch.where(mask, kept, hidden)
    return _padded(mask, 16)[..., :length].expand(*query.shape[:-1], length)


_Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_Cast = Callable[[Any, _Arguments], _Arguments]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


FP32 = _names(
    """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm
    rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity dist
    pdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
    _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
    upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa
    """
)
"""``AT_FORALL_FP32``, except operators that the CPU casts in the same way."""
FP32_RESULT = _names(
    """
    softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
    """
)
"""``AT_FORALL_FP32_SET_OPT_DTYPE``: the result is fp32, the argument is not cast."""
LOWER = _names(
    """
    _convolution convolution addmv addr mv einsum chain_matmul linalg_multi_dot
    _thnn_fused_lstm_cell _thnn_fused_gru_cell _scaled_dot_product_flash_attention lstm_cell gru_cell
    rnn_tanh_cell rnn_relu_cell
    """
)
"""``AT_FORALL_LOWER_PRECISION_FP``, except operators that the CPU casts in the same way."""
WIDEST = _names("addcdiv addcmul atan2 bilinear cross dot vdot index_put tensordot scatter_add")
"""``AT_FORALL_PROMOTE``."""
_FUSED = {"softmax.int": aten._softmax.default, "log_softmax.int": aten._log_softmax.default}
"""CUDA kernels that turn fp16 into fp32 without an intermediate copy; bf16 needs one
(ATen/native/SoftMax.cpp)."""


@contextmanager
def cuda_policy(capability: Capability) -> Iterator[None]:
    """Apply the policy of a GPU of this compute capability to operators on CPU tensors within the block."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]

    def replace(name: str, kernel: Callable[..., Any], key: str = "AutogradCPU") -> None:
        library.impl(name, kernel, key, allow_override=True)  # type: ignore[no-untyped-call]

    try:
        with warnings.catch_warnings():
            # torch warns about replaced kernels once, but here that is the purpose.
            warnings.simplefilter("ignore", UserWarning)
            cuda, cpu = _autocast_names("AutocastCUDA"), _autocast_names("AutocastCPU")
            for name in cpu - cuda:
                replace(name, torch.library.fallthrough_kernel, "AutocastCPU")
            for name in cuda - cpu:
                cast = _cast_of(name)
                if cast is not None:
                    replace(name, _autocast_kernel(name, cast), "AutocastCPU")
            replace("dropout", _dropout)
            replace("scaled_dot_product_attention", attention_operator(capability))
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def as_on_cuda(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer update all parameters at once, as it does by default on CUDA.

    torch decides by exact type and device (torch/optim/optimizer.py, ``_default_to_fused_or_foreach``), and
    fake CPU parameters match neither.
    """
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            # torch updates one after the other if the rate is a tensor that no graph captures.
            on_host = isinstance(group.get("lr"), Tensor) and not group.get("capturable", False)
            group["foreach"] = not (group.get("differentiable", False) or on_host)


def _autocast_names(key: str) -> set[str]:
    """Return the names of torch's own operators with a kernel at a dispatch key."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def _cast_of(name: str) -> _Cast | None:
    """Return what CUDA's autocast does to the arguments of an operator; None if nothing."""
    if name in FP32:
        return lambda _, arguments: _cast(arguments, torch.float32)
    if name in FP32_RESULT:
        return _with_fp32_result
    if name in LOWER:
        return lambda _, arguments: _cast(arguments, torch.get_autocast_dtype("cpu"))
    return _to_widest if name in WIDEST else None


def _autocast_kernel(name: str, cast: _Cast) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(aten, packet), overload or "default")
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(autocast):
            args, kwargs = cast(operator, (args, kwargs))
            fused = _FUSED.get(name)
            if fused is not None and args[0].dtype is torch.float16 and kwargs.get("dtype") is torch.float32:
                return fused(args[0], args[1], True)
            return operator(*args, **kwargs)

    return kernel


def _cast(arguments: _Arguments, dtype: torch.dtype) -> _Arguments:
    def one(tensor: Tensor) -> Tensor:
        eligible = tensor.is_floating_point() and tensor.dtype is not torch.float64
        return tensor.to(dtype) if eligible else tensor

    args, kwargs = tree_map_only(Tensor, one, arguments)
    return args, kwargs


def _to_widest(_: Any, arguments: _Arguments) -> _Arguments:
    is_wide = any(isinstance(one, Tensor) and one.dtype is torch.float32 for one in tree_leaves(arguments))
    return _cast(arguments, torch.float32) if is_wide else arguments


def _with_fp32_result(operator: Any, arguments: _Arguments) -> _Arguments:
    """Request an fp32 result, unless the caller requests a type or the argument has no 16-bit type."""
    args, kwargs = arguments
    names = [argument.name for argument in operator._schema.arguments]
    given = args[names.index("dtype")] if "dtype" in names[: len(args)] else kwargs.get("dtype")
    if given is not None or not isinstance(args[0], Tensor) or args[0].dtype not in _LOW:
        return arguments
    return args[: names.index("dtype")], {**kwargs, "dtype": torch.float32}


class _FusedDropout(torch.autograd.Function):
    """The allocations of CUDA's dropout: a mask of one byte per element, and then the result.

    The CPU's mask has the type of the input (ATen/native/Dropout.cpp and cuda/Dropout.cu).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty_like(x, dtype=torch.bool))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.empty_like(grad)


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    if train and 0 < p < 1 and x.numel() > 0:
        return _FusedDropout.apply(x)  # type: ignore[no-any-return, no-untyped-call]
    return x * torch.zeros_like(x) if train and p == 1 else x
