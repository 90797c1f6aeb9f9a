"""CUDA's operator policy for CPU tensors, so that a step traced without a GPU allocates what a GPU would.

The two differ in the lists of autocast (CUDA keeps layer norms, softmax and losses in fp32, the CPU does
not), in fused attention, dropout and RMS norm, and in optimizers that update all parameters at once. The
lists are those of ATen/autocast_mode.h (torch 2.13). The dispatcher tells which side has a kernel.
Kernels are replaced for the whole process, so the policy is for short use by one thread. A
``TorchFunctionMode`` is no alternative: it is off inside ``backward``, where checkpoints recompute.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from autobatch.footprint.tracing.attention import attention_kernel

aten = torch.ops.aten

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FP32 = _names(
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
_FP32_RESULT = _names(
    """
    softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
    """
)
"""``AT_FORALL_FP32_SET_OPT_DTYPE``: the result is fp32, the argument is not cast."""
_LOWER = _names(
    """
    _convolution convolution addmv addr mv einsum chain_matmul linalg_multi_dot
    _thnn_fused_lstm_cell _thnn_fused_gru_cell _scaled_dot_product_flash_attention lstm_cell gru_cell
    rnn_tanh_cell rnn_relu_cell
    """
)
"""``AT_FORALL_LOWER_PRECISION_FP``, except operators that the CPU casts in the same way."""
_WIDEST = _names(
    """
    addcdiv addcmul atan2 bilinear cross dot vdot index_put tensordot scatter_add
    """
)
"""``AT_FORALL_PROMOTE``."""
_LOW = (torch.float16, torch.bfloat16)
_FUSED = {"softmax.int": aten._softmax.default, "log_softmax.int": aten._log_softmax.default}
"""CUDA kernels that turn fp16 into fp32 without an intermediate copy; bf16 needs one
(ATen/native/SoftMax.cpp)."""


@contextmanager
def cuda_policy(capability: tuple[int, int]) -> Iterator[None]:
    """Apply CUDA's policy to operators on CPU tensors within the block.

    Args:
        capability: the GPU's compute capability, which decides on the attention kernels.
    """
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    # oneDNN hides the gates of a recurrent layer from traces. Without it they are tensors, about as large as
    # what cuDNN keeps.
    onednn = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        with warnings.catch_warnings():
            # torch warns about replaced kernels once, but here that is the purpose.
            warnings.simplefilter("ignore", UserWarning)
            _exchange_autocast(library)
            _replace(library, "dropout", _dropout, "AutogradCPU")
            _replace(library, "linear", _linear, "AutogradCPU")
            _replace(library, "binary_cross_entropy_with_logits", _logits_loss, "AutogradCPU")
            _replace(library, "rms_norm", _rms_norm, "AutogradCPU")
            _replace(library, "scaled_dot_product_attention", attention_kernel(capability), "AutogradCPU")
        yield
    finally:
        torch._C._set_mkldnn_enabled(onednn)
        library._destroy()  # type: ignore[no-untyped-call]


def prefer_foreach(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer update all parameters at once, as it does by default on CUDA.

    torch decides by exact type and device (torch/optim/optimizer.py, ``_default_to_fused_or_foreach``), and
    fake CPU parameters match neither.
    """
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            # torch updates one after the other if the rate is a tensor that no graph captures.
            on_host = isinstance(group.get("lr"), Tensor) and not group.get("capturable", False)
            group["foreach"] = not (group.get("differentiable", False) or on_host)


def leave_gpus_alone(optimizer: torch.optim.Optimizer) -> None:
    """Skip torch's check for CUDA graphs in the steps of an optimizer of fakes.

    It asks the current stream of the current GPU (torch/optim/optimizer.py), and so opens a context on a GPU
    that nobody has chosen.
    """
    check = "_accelerator_graph_capture_health_check"
    if hasattr(optimizer, check):
        setattr(optimizer, check, lambda: None)


def missing_parts() -> list[str]:
    """Return the private parts of torch that the policy needs and this torch lacks."""
    needed = {
        "torch._C._dispatch_get_registrations_for_dispatch_key": torch._C,
        "torch._C._ExcludeDispatchKeyGuard": torch._C,
        "torch._C._get_mkldnn_enabled": torch._C,
        "torch._C._set_mkldnn_enabled": torch._C,
        "torch.library.fallthrough_kernel": torch.library,
    }
    missing = [name for name, place in needed.items() if not hasattr(place, name.rpartition(".")[2])]
    kernels = (
        "native_dropout",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_attention_math",
    )
    return missing + [f"aten::{name}" for name in kernels if not hasattr(aten, name)]


def _exchange_autocast(library: Any) -> None:
    """Give the CPU's autocast key CUDA's policy. The CPU keeps its kernel if both cast an operator."""
    cuda, cpu = _autocast_names("AutocastCUDA"), _autocast_names("AutocastCPU")
    for name in cpu - cuda:
        _replace(library, name, torch.library.fallthrough_kernel, "AutocastCPU")
    for name in cuda - cpu:
        cast = _policy_of(name)
        if cast is not None:
            _replace(library, name, _autocast_kernel(name, cast), "AutocastCPU")


def _autocast_names(key: str) -> set[str]:
    """Return the names of torch's own operators with a kernel at a dispatch key."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def _replace(library: Any, name: str, kernel: Callable[..., Any], key: str) -> None:
    library.impl(name, kernel, key, allow_override=True)


def _policy_of(name: str) -> Callable[[Any, _Arguments], _Arguments] | None:
    if name in _FP32:
        return lambda _, arguments: _cast(arguments, torch.float32)
    if name in _FP32_RESULT:
        return _with_fp32_result
    if name in _LOWER:
        return lambda _, arguments: _cast(arguments, torch.get_autocast_dtype("cpu"))
    return _to_widest if name in _WIDEST else None


def _autocast_kernel(name: str, cast: Callable[[Any, _Arguments], _Arguments]) -> Callable[..., Any]:
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
    dtypes: list[torch.dtype] = []
    tree_map_only(Tensor, lambda tensor: dtypes.append(tensor.dtype), arguments)
    return _cast(arguments, torch.float32) if torch.float32 in dtypes else arguments


def _with_fp32_result(operator: Any, arguments: _Arguments) -> _Arguments:
    """Request an fp32 result, unless the caller requests a type or the argument has no 16-bit type."""
    args, kwargs = arguments
    names = [argument.name for argument in operator._schema.arguments]
    given = args[names.index("dtype")] if "dtype" in names[: len(args)] else kwargs.get("dtype")
    if given is not None or not isinstance(args[0], Tensor) or args[0].dtype not in _LOW:
        return arguments
    return args[: names.index("dtype")], {**kwargs, "dtype": torch.float32}


class _FusedDropout(torch.autograd.Function):
    """The allocations of CUDA's dropout: a mask of one byte per element, and then the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty_like(x, dtype=torch.bool))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.empty_like(grad)


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Run CUDA's fused kernel (ATen/native/Dropout.cpp and cuda/Dropout.cu)."""
    if train and 0 < p < 1 and x.numel() > 0:
        return _FusedDropout.apply(x)  # type: ignore[no-any-return, no-untyped-call]
    return x * torch.zeros_like(x) if train and p == 1 else x


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Run a linear layer, with its bias added in place, unlike torch for fakes (ATen/native/Linear.cpp)."""
    if bias is None:
        return x.matmul(weight.t())
    if x.dim() == 2:
        return torch.addmm(bias, x, weight.t())
    if bias.dim() == 1 and x.dim() > 2 and x.is_contiguous():
        rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(0, x.shape[-1])
        return torch.addmm(bias, rows, weight.t()).view(*x.shape[:-1], weight.shape[0])
    return x.matmul(weight.t()).add_(bias)


class _LogitsLoss(torch.autograd.Function):
    """The allocations of a binary cross entropy of logits (ATen/native/Loss.cpp, and its derivative)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor, weighted: int, reduction: int) -> Tensor:
        ctx.save_for_backward(x, target)
        each = torch.empty_like(x), torch.empty_like(x), *(torch.empty_like(x) for _ in range(weighted))
        return each[0] if reduction == 0 else each[0].mean() if reduction == 1 else each[0].sum()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, None, None, None]:
        return torch.empty_like(ctx.saved_tensors[0]), None, None, None


def _logits_loss(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = 1,
) -> Tensor:
    """Run the loss in place where torch does: it makes copies of fakes."""
    found: Tensor = _LogitsLoss.apply(x, target, int(pos_weight is not None), reduction)  # type: ignore[no-untyped-call]
    return found


class _FusedRmsNorm(torch.autograd.Function):
    """The allocations of ``_fused_rms_norm`` and of its backward pass.

    The CPU has no such kernel and runs six operators, which keep five times as much for the backward pass.
    CUDA's rule is that of ``rms_norm_symint`` in ATen/native/layer_norm.cpp (torch 2.13).
    """

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


def _rms_norm(
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
