"""Memory of the kernels of operators, where torch's fakes take something else.

`kernel_of` returns functions with the storages of a kernel: each takes the arguments of its operator, and
calls others on fakes. A recorder counts the storages of what it returns.

`kernel_on_gpu` returns functions for kernels of a GPU that hold memory beside their results, or take these in
another order. Each takes from a `Pad` what its kernel takes: in the kernel's order, because a caching
allocator gives another block otherwise. All of it is freed before the operator returns. The kernels are those
in ATen/native/cuda of torch 2.13. Not known here are cuDNN's workspaces for convolutions, and those of the
sort behind the gradient of an embedding of more than 3,072 indices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from autobatch.footprint.reductions import Dimension, Reduction
from autobatch.footprint.tracing.attention import efficient_scratch, flash_scratch
from autobatch.step.gradients import LOW_PRECISION

aten = torch.ops.aten
_REDUCED = {
    aten.mse_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.soft_margin_loss.default: 2,
    aten.binary_cross_entropy.default: 3,
}
"""Losses that write one value per element into their result and then shrink it to one number, with the index
of their reduction argument. The storage keeps its size (ATen/native/Loss.cpp), which meta kernels do not
show."""


def kernel_of(func: Any, args: tuple[Any, ...], *, on_gpu: bool) -> Callable[..., Any]:
    """Return a function with the storages of an operator's kernel: the operator if its fakes have them.

    Args:
        func: the operator.
        args: its arguments.
        on_gpu: whether it runs on a GPU.
    """
    if func in _REDUCED and (args[_REDUCED[func]] if len(args) > _REDUCED[func] else 1):
        return _loss_per_element
    if func in _SPARSE and any(map(_is_sparse, args)):
        return _SPARSE[func]
    if func is aten._embedding_bag_backward.default and args[9]:
        return _sparse_gradient_of_bags
    if func is aten.native_batch_norm.default and args[0].dtype in LOW_PRECISION:
        return partial(_batch_norm, on_gpu=on_gpu)
    found: Callable[..., Any] = (_ON_GPU if on_gpu else _ON_CPU).get(func, func)
    return found


def _loss_per_element(x: Tensor, y: Tensor, *_: Any) -> Tensor:
    """Return one number in a storage with one element per pair of broadcast elements."""
    shape = torch.broadcast_shapes(x.shape, y.shape)  # type: ignore[no-untyped-call]
    each = torch.empty(shape, dtype=torch.promote_types(x.dtype, y.dtype), device=x.device)
    one: Tensor = aten.as_strided.default(each, [], [])
    return one


def _is_sparse(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.sparse_coo


def _copied(x: Tensor, **_: Any) -> Tensor:
    """Copy a sparse tensor with its entries, which the meta kernel leaves out."""
    return _with_entries(x._indices().clone(), x._values().clone(), x, x.is_coalesced())


def _coalesced(x: Tensor) -> Tensor:
    """Return a sparse tensor with room for all entries, also for those of equal rows.

    The CPU takes this room and uses a part of it; CUDA takes less if rows are equal
    (ATen/native/sparse/SparseTensor.cpp, and cuda/SparseCUDATensor.cu).
    """
    return _with_entries(x._indices().clone(), x._values().clone(), x, True)


def _masked(x: Tensor, mask: Tensor) -> Tensor:
    """Return the entries of a dense tensor at those of a sparse one."""
    values = torch.empty_like(mask._values(), dtype=x.dtype)
    return _with_entries(mask._indices().clone(), values, mask, mask.is_coalesced())


def _added(x: Tensor, other: Tensor, **_: Any) -> Tensor:
    """Add to a tensor in place; a sparse one gets the entries of both."""
    if _is_sparse(x):
        indices = torch.cat([x._indices(), other._indices()], 1)
        x.data = _with_entries(indices, torch.cat([x._values(), other._values()]), x, False)
    return x


def _with_entries(indices: Tensor, values: Tensor, like: Tensor, is_coalesced: bool) -> Tensor:
    made: Tensor = torch.sparse_coo_tensor(
        indices, values, like.shape, check_invariants=False, is_coalesced=is_coalesced
    )
    return made


_SPARSE: dict[Any, Callable[..., Tensor]] = {
    aten.add_.Tensor: _added,
    aten.clone.default: _copied,
    aten._coalesce.default: _coalesced,
    aten.sparse_mask.default: _masked,
}


def _embedding_bag_on_cpu(*args: Any, **kwargs: Any) -> Any:
    """Return the results with room for one more index (``make_offset2bag_out`` in EmbeddingBag.cpp)."""
    out = aten._embedding_bag.default(*args, **kwargs)
    bags = out[1]
    if not bags.numel():
        return out
    room = torch.empty(bags.numel() + 1, dtype=bags.dtype, device=bags.device)
    return (out[0], room[:-1], *out[2:])


def _sparse_gradient_of_bags(grad: Tensor, indices: Tensor, *more: Any, **_: Any) -> Tensor:
    """Return one entry per index; the meta kernel has none if the forward pass computes no bags."""
    values = torch.empty((indices.numel(), grad.shape[1]), dtype=grad.dtype, device=grad.device)
    shape = (more[4], grad.shape[1])
    made: Tensor = torch.sparse_coo_tensor(indices.reshape(1, -1), values, shape, check_invariants=False)
    return made


def _recurrent_backward(*args: Any) -> Any:
    """Return a gradient for each bias; the meta kernel returns one tensor for both at its first call."""
    out = aten.mkldnn_rnn_layer_backward.default(*args)
    return (*out[:4], torch.empty_like(out[3]), *out[5:])


def _batch_norm(x: Tensor, weight: Tensor | None, *more: Any, on_gpu: bool) -> Any:
    """Return the statistics in the type of the weight, and on GPUs in float32; the meta kernel has that of x.

    See native/Normalization.cpp and native/cuda/Normalization.cu.
    """
    out, *statistics = aten.native_batch_norm.default(x, weight, *more)
    dtype = torch.float32 if on_gpu else x.dtype if weight is None else weight.dtype
    return (out, *(torch.empty_like(one, dtype=dtype) for one in statistics))


def _layer_norm(*args: Any) -> Any:
    """Return the statistics in float32 for 16 bits too (native/cuda/layer_norm_kernel.cu)."""
    out, *statistics = aten.native_layer_norm.default(*args)
    if args[0].dtype not in LOW_PRECISION:
        return (out, *statistics)
    return (out, *(torch.empty_like(one, dtype=torch.float32) for one in statistics))


def _log_sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return an empty buffer: only the CPU keeps one (native/Activation.cpp)."""
    return torch.empty_like(x), x.new_empty(0)


_ON_CPU: dict[Any, Callable[..., Any]] = {
    aten._embedding_bag.default: _embedding_bag_on_cpu,
    aten.mkldnn_rnn_layer_backward.default: _recurrent_backward,
}
_ON_GPU: dict[Any, Callable[..., Any]] = {
    aten.native_layer_norm.default: _layer_norm,
    aten.log_sigmoid_forward.default: _log_sigmoid,
}


_CHUNK = 65536
"""Elements that a block of threads reduces in ``_foreach_norm``: ``kChunkSize`` in MultiTensorApply.cuh."""


class Pad(Protocol):
    """The memory of a GPU, as far as a kernel takes it by itself."""

    def held(self, size: int) -> AbstractContextManager[int]:
        """Hold bytes within the block."""

    def reducing(self, reduction: Reduction) -> AbstractContextManager[None]:
        """Hold the scratch of a reduction within the block."""

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Count results in this order."""

    def uncounted(self) -> AbstractContextManager[None]:
        """Count no results within the block."""


Kernel = Callable[[Pad, Callable[[], Any], tuple[Any, ...]], Any]
"""Runs an operator on a pad: given what runs it on fakes and counts its results, and its arguments."""


class _Kind(NamedTuple):
    """The template arguments of a reduction."""

    sum_bytes: Callable[[torch.dtype], int]
    vector: int = 4


def _wide(dtype: torch.dtype) -> int:
    """Return the bytes of ``acc_type``: 16-bit numbers are summed in float32."""
    return 4 if dtype in LOW_PRECISION else dtype.itemsize


_SUM = _Kind(_wide)
_SAME = _Kind(lambda dtype: dtype.itemsize)
_MOMENTS = _Kind(lambda dtype: 4 * _wide(dtype), vector=2)
"""``WelfordData``: mean, squares, and twice the count."""
_INDEXED = _Kind(lambda _: 16)
"""A value with its index, ``pair<scalar_t, int64_t>``."""
_BOOLEAN = _Kind(lambda _: 1)


def kernel_on_gpu(func: Any) -> Kernel | None:
    """Return what runs an operator as a GPU does; None if its results are all that it takes."""
    return _KERNELS.get(func)


def _reduction(x: Tensor, out: Tensor, dims: Sequence[int], kind: _Kind) -> Reduction:
    """Describe the reduction of a tensor over some of its dimensions."""
    strides = iter(out.stride()) if out.dim() != x.dim() else None
    dimensions = []
    for at, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        own = 0 if at in dims else (out.stride(at) if strides is None else next(strides))
        dimensions.append(Dimension(size, stride * x.element_size(), own * out.element_size()))
    offset = int(x.storage_offset())
    return Reduction(x.element_size(), kind.sum_bytes(x.dtype), kind.vector, offset, tuple(dimensions))


def _over(x: Tensor, dims: Any) -> list[int]:
    """Return the dimensions to reduce, all for none."""
    if dims is None or dims == []:
        return list(range(x.dim()))
    return [dim % max(x.dim(), 1) for dim in (dims if isinstance(dims, list | tuple) else [dims])]


def _reduces(kind: _Kind, *, casts: bool = False) -> Kernel:
    """Return the kernel of a reduction whose second argument is its dimensions.

    Args:
        kind: of the reduction.
        casts: True if the input is copied to the type of the result first, unless that only widens 16 bits.
    """

    def kernel(pad: Pad, run: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        result = run()
        x, out = args[0], result[0] if isinstance(result, tuple | list) else result
        if not x.numel():
            return result
        dims = _over(x, args[1] if len(args) > 1 else None)
        with ExitStack() as stack:
            if (
                casts
                and out.dtype != x.dtype
                and not (x.dtype in LOW_PRECISION and out.dtype is torch.float32)
            ):
                x = torch.empty_like(x, dtype=out.dtype)
                stack.enter_context(pad.held(x.numel() * x.element_size()))
            stack.enter_context(pad.reducing(_reduction(x, out, dims, kind)))
        return result

    return kernel


def _norm(pad: Pad, run: Callable[[], Any], args: tuple[Any, ...]) -> Any:
    """Run a norm, whose dimensions are its third argument."""
    return _reduces(_SUM, casts=True)(pad, run, (args[0], *args[2:3]))


def _variance(pad: Pad, run: Callable[[], Any], args: tuple[Any, ...]) -> Any:
    return _reduces(_MOMENTS)(pad, run, args)


def _over_all(x: Tensor) -> Reduction:
    return _reduction(x, x.new_empty(()), range(x.dim()), _SUM)


def _elements_of(args: tuple[Any, ...]) -> Tensor:
    """Return a fake of one value for each element of a loss."""
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
    return torch.empty(shape, dtype=args[0].dtype, device=args[0].device)


def _reduced_loss(pad: Pad, run: Callable[[], Any], args: tuple[Any, ...]) -> Any:
    """Run a loss whose result has the storage of one value for each element (Loss.cpp, structured)."""
    result, each = run(), _elements_of(args)
    if result.dim() == 0 and each.dim():
        with pad.held(each.numel() * each.element_size()), pad.reducing(_over_all(each)):
            pass
    return result


def _copied_loss(pad: Pad, run: Callable[[], Any], args: tuple[Any, ...]) -> Any:
    """Run a loss that is reduced apart, and copied into the storage of its elements (cuda/Loss.cu)."""
    result, each = run(), _elements_of(args)
    if result.dim() == 0 and each.dim():
        with pad.held(each.element_size()), pad.reducing(_over_all(each)):
            pass
    return result


def _huber_loss(pad: Pad, run: Callable[[], Any], args: tuple[Any, ...]) -> Any:
    each = _elements_of(args)
    if len(args) > 2 and args[2] == 0:
        return run()
    with pad.held(each.numel() * each.element_size()):
        result = run()
        with pad.reducing(_over_all(each)):
            return result


def _foreach_norm(pad: Pad, run: Callable[[], Any], args: tuple[Any, ...]) -> Any:
    """Run the norms of many tensors: each has a partial norm per chunk (ForeachReduceOp.cu)."""
    tensors = [x for x in args[0] if x.numel()]
    chunks = max((-(-x.numel() // _CHUNK) for x in tensors), default=0)
    with pad.held(len(args[0]) * chunks * (_wide(tensors[0].dtype) if tensors else 0)):
        return run()


def _group_norm(pad: Pad, run: Callable[[], Any], args: tuple[Any, ...]) -> Any:
    """Run a group norm, with a factor and a term for each channel of each sample (group_norm_kernel.cu)."""
    x, weight, bias, samples, channels, _, groups = args[:7]
    item, is_low = _wide(x.dtype), x.dtype in LOW_PRECISION
    with ExitStack() as stack:
        if not x.is_contiguous():
            stack.enter_context(pad.held(x.numel() * x.element_size()))
        result = run()
        sizes = [samples * groups * item] * 2 * is_low
        sizes += [samples * channels * item] * 2 * (weight is not None or bias is not None)
        for size in sizes:
            stack.enter_context(pad.held(size))
    return result


def _group_norm_backward(pad: Pad, run: Callable[[], Any], args: tuple[Any, ...]) -> Any:
    """Run its backward pass, with the sums of each channel and the factors of each group."""
    result = run()
    x, weight, samples, channels, groups = args[1], args[4], args[5], args[6], args[8]
    item = _wide(x.dtype)
    channel, group = samples * channels * item, samples * groups * item
    with ExitStack() as stack:
        for size in (channel, channel, group, group, *([] if weight is None else [channel])):
            stack.enter_context(pad.held(size))
    return result


def _softmax_backward(pad: Pad, run: Callable[[], Any], args: tuple[Any, ...]) -> Any:
    """Run the backward pass of a softmax, with the product of gradient and result (SoftMax.cu)."""
    result = run()
    with pad.held(args[0].numel() * args[0].element_size()):
        return result


def _convolution_backward(pad: Pad, run: Callable[[], Any], args: tuple[Any, ...]) -> Any:
    """Run the backward pass of a convolution, which sums the gradient of its bias over all but channels."""
    result = run()
    grad, bias = args[0], result[2]
    if bias is None or not grad.numel():
        return result
    with pad.reducing(_reduction(grad, bias, [dim for dim in range(grad.dim()) if dim != 1], _SUM)):
        return result


def _cudnn_attention(pad: Pad, run: Callable[[], Any], args: tuple[Any, ...]) -> Any:
    """Run cuDNN's attention, which takes the seeds of its dropout first."""
    with pad.uncounted():
        result = run()
    pad.count([*result[6:8], *result[:2]])
    return result


def _efficient_attention(pad: Pad, run: Callable[[], Any], args: tuple[Any, ...]) -> Any:
    """Run memory-efficient attention, whose seeds are on the host."""
    with pad.uncounted():
        result = run()
    pad.count(result[:2])
    return result


def _efficient_attention_backward(pad: Pad, run: Callable[[], Any], args: tuple[Any, ...]) -> Any:
    """Run its backward pass, see `efficient_scratch`; fp32 forms the product of output and gradient first."""
    grad, query = args[:2]
    delta, workspace = efficient_scratch(query)
    with ExitStack() as product, ExitStack() as stack:
        if not grad.transpose(1, 2).is_contiguous():
            stack.enter_context(pad.held(grad.numel() * grad.element_size()))
        result = run()
        if query.dtype is torch.float32:
            product.enter_context(pad.held(query.numel() * query.element_size()))
            product.enter_context(pad.held(delta))
        stack.enter_context(pad.held(delta))
        product.close()
        stack.enter_context(pad.held(workspace))
    return result


def _flash_attention(pad: Pad, run: Callable[[], Any], args: tuple[Any, ...]) -> Any:
    """Run flash attention, which takes the state of its dropout twice."""
    if len(args) < 4 or not args[3]:
        return run()
    with pad.uncounted():
        result = run()
    state, unused = result[6:8]
    pad.count(result[:2])
    with pad.held(state.numel() * state.element_size()):
        pad.count([unused, state])
    return result


def _flash_attention_backward(pad: Pad, run: Callable[[], Any], args: tuple[Any, ...]) -> Any:
    """Run its backward pass, in which lengths come before heads (flash_attn/flash_api.cpp)."""
    with ExitStack() as stack:
        for x in (args[0], args[4]):
            if not x.transpose(1, 2).is_contiguous():
                stack.enter_context(pad.held(x.numel() * x.element_size()))
        result = run()
        for size in flash_scratch(args[1], args[2]):
            stack.enter_context(pad.held(size))
    return result


def _cudnn_attention_backward(pad: Pad, run: Callable[[], Any], args: tuple[Any, ...]) -> Any:
    """Run the backward pass of cuDNN's attention, as far as cudnn-frontend knows its workspace.

    That are the row sums of output times gradient, and an accumulator for the gradient of the query.
    """
    result = run()
    batch, heads, length, head = args[1].shape
    with pad.held(4 * batch * heads * length * (1 + head)):
        return result


def adds_bias_in_product(
    bias: Tensor, x: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1
) -> bool:
    """Return whether cuBLASLt runs ``addmm``, by ``isInputCompliesAddmmCudaLt`` of ATen."""
    is_vector = bias.numel() == bias.shape[-1] if bias.dim() else False
    return (
        beta == 1
        and is_vector
        and bias.is_contiguous()
        and bias.shape[-1] == weight.shape[1]
        and min(weight.shape) > 1
        and x.is_floating_point()
    )


def _copies(*places: int, is_first: bool = False, any_format: bool = False) -> Kernel:
    """Return the kernel of an operator that copies some of its arguments unless they are contiguous.

    Args:
        places: of the arguments.
        is_first: True if it copies before it takes its result.
        any_format: True if channels may be last.
    """

    def kernel(pad: Pad, run: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        copied = [args[place] for place in places if not _is_contiguous(args[place], any_format)]
        with ExitStack() as stack:
            result = None if is_first else run()
            for x in copied:
                stack.enter_context(pad.held(x.numel() * x.element_size()))
            return run() if is_first else result

    return kernel


def _is_contiguous(x: Tensor, any_format: bool) -> bool:
    if any_format and x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return True
    return x.is_contiguous()


def _log_sum_exp(pad: Pad, run: Callable[[], Any], args: tuple[Any, ...]) -> Any:
    """Run a logsumexp, with the largest values and the exponentials (ATen/native/ReduceOps.cpp)."""
    with pad.uncounted():
        result = run()
    x, size = args[0], result.numel() * result.element_size()
    with pad.held(size):
        with pad.held(size), pad.held(result.numel()):
            pass
        with pad.held(x.numel() * x.element_size()):
            pad.count([result])
    return result


def _batch_norm_backward(pad: Pad, run: Callable[[], Any], args: tuple[Any, ...]) -> Any:
    """Run the backward pass of a batch norm of features, which cuDNN does not run (cuda/Normalization.cu).

    It takes two sums and the gradients of weight and bias before that of the input.
    """
    x = args[1]
    if x.dim() != 2:
        return _copies(0, is_first=True, any_format=True)(pad, run, args)
    with pad.uncounted():
        result = run()
    size = 4 * x.shape[1]
    with pad.held(size), pad.held(size):
        pad.count([*(one for one in result[1:] if one is not None), result[0]])
    return result


_IN_ANY_FORMAT = frozenset(
    {
        "upsample_nearest2d",
        "_upsample_nearest_exact2d",
        "upsample_bilinear2d",
        "avg_pool2d",
        "max_pool2d_with_indices",
    }
)
_SCALED = _IN_ANY_FORMAT | {
    "upsample_nearest1d",
    "upsample_nearest3d",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
    "avg_pool3d",
    "_adaptive_avg_pool2d",
    "adaptive_max_pool2d",
    "max_pool3d_with_indices",
    "reflection_pad2d",
}
"""Operators whose backward pass copies a gradient that is a part of another one, as of a concatenation."""
_KERNELS: dict[Any, Kernel] = {
    aten.sum.default: _reduces(_SUM, casts=True),
    aten.sum.dim_IntList: _reduces(_SUM, casts=True),
    aten.nansum.default: _reduces(_SUM, casts=True),
    aten.mean.default: _reduces(_SUM, casts=True),
    aten.mean.dim: _reduces(_SUM, casts=True),
    aten.linalg_vector_norm.default: _norm,
    aten.var.correction: _variance,
    aten.std.correction: _variance,
    aten.var_mean.correction: _variance,
    aten.std_mean.correction: _variance,
    aten.amax.default: _reduces(_SAME),
    aten.amin.default: _reduces(_SAME),
    aten.max.default: _reduces(_SAME),
    aten.min.default: _reduces(_SAME),
    aten.max.dim: _reduces(_INDEXED),
    aten.min.dim: _reduces(_INDEXED),
    aten.argmax.default: _reduces(_INDEXED),
    aten.argmin.default: _reduces(_INDEXED),
    aten.any.default: _reduces(_BOOLEAN),
    aten.any.dim: _reduces(_BOOLEAN),
    aten.all.default: _reduces(_BOOLEAN),
    aten.all.dim: _reduces(_BOOLEAN),
    aten.mse_loss.default: _reduced_loss,
    aten.smooth_l1_loss.default: _reduced_loss,
    aten.binary_cross_entropy.default: _copied_loss,
    aten.soft_margin_loss.default: _copied_loss,
    aten.huber_loss.default: _huber_loss,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten.convolution_backward.default: _convolution_backward,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._softmax.default: _copies(0),
    aten._log_softmax.default: _copies(0),
    aten.native_layer_norm.default: _copies(0, is_first=True),
    aten.logsumexp.default: _log_sum_exp,
    aten.embedding_dense_backward.default: _copies(0, is_first=True),
    aten.native_layer_norm_backward.default: _copies(0, 1, is_first=True),
    aten._log_softmax_backward_data.default: _copies(0),
    **{
        getattr(aten, f"{name}_backward").default: _copies(0, any_format=name in _IN_ANY_FORMAT)
        for name in _SCALED
    },
    aten._scaled_dot_product_cudnn_attention.default: _cudnn_attention,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_attention_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient_attention,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_attention_backward,
    aten._scaled_dot_product_flash_attention.default: _flash_attention,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_attention_backward,
}
