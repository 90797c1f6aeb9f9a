"""Memory of the kernels of operators, where torch's fakes take something else.

`kernel_of` returns functions with the storages of a kernel: each takes the arguments of its operator, and
calls others on fakes. A recorder counts the storages of what it returns.

`kernel_on_gpu` returns functions for kernels of a GPU that hold memory beside their results, or take these in
another order, because a caching allocator gives another block otherwise. The kernels are those in
ATen/native/cuda of torch 2.13. Not known here are cuDNN's workspaces for convolutions, and those of the sort
behind the gradient of an embedding of more than 3,072 indices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from autobatch.footprint.reductions import Dimension, Reduction
from autobatch.footprint.tracing.attention import efficient_scratch, flash_scratch
from autobatch.step.gradients import LOW_PRECISION

aten = torch.ops.aten


def operators(names: str) -> list[Any]:
    """Return the operators of torch with these names, each with its overload unless that is the default."""
    return [attrgetter(name if "." in name else f"{name}.default")(aten) for name in names.split()]


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
    low = func in _NORMS and args[0].dtype in LOW_PRECISION
    if low and (on_gpu or (func is aten.native_batch_norm.default and args[1] is not None)):
        return partial(_with_statistics, func, torch.float32 if on_gpu else args[1].dtype)
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


def _copied(x: Tensor, *, is_coalesced: bool | None = None, **_: Any) -> Tensor:
    """Copy a sparse tensor with its entries, which the meta kernel leaves out.

    One that is coalesced has room for all entries, also for those of equal rows. The CPU takes this room and
    uses a part of it; CUDA takes less if rows are equal (ATen/native/sparse/SparseTensor.cpp, and
    cuda/SparseCUDATensor.cu).
    """
    is_coalesced = x.is_coalesced() if is_coalesced is None else is_coalesced
    return _with_entries(x._indices().clone(), x._values().clone(), x, is_coalesced)


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
    aten._coalesce.default: partial(_copied, is_coalesced=True),
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


_NORMS = (aten.native_batch_norm.default, aten.native_layer_norm.default)


def _with_statistics(func: Any, dtype: torch.dtype, *args: Any) -> Any:
    """Return results of a norm with statistics of a type; meta kernels give them that of the input.

    On GPUs it is float32, and on the CPU that of the weight of a batch norm (native/Normalization.cpp,
    native/cuda/Normalization.cu and layer_norm_kernel.cu).
    """
    out, *statistics = func(*args)
    return (out, *(torch.empty_like(one, dtype=dtype) for one in statistics))


def _log_sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return an empty buffer: only the CPU keeps one (native/Activation.cpp)."""
    return torch.empty_like(x), x.new_empty(0)


def _grouped(a: Tensor, b: Tensor, offsets: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Return products of groups of rows, as experts have them, of any type: torch's own fake has one type.

    The kernel pads each row to 16 bytes (ATen/native/GroupedMMUtils.h).
    """
    groups = [len(offsets)] if a.dim() == b.dim() == 2 and offsets is not None else []
    batch = [len(a)] if a.dim() == b.dim() == 3 else groups
    columns, step = b.shape[-1], 16 // a.element_size()
    return a.new_empty([*batch, a.shape[-2], -(-columns // step) * step])[..., :columns]


_ON_CPU: dict[Any, Callable[..., Any]] = {
    aten._grouped_mm.default: _grouped,
    aten._embedding_bag.default: _embedding_bag_on_cpu,
    aten.mkldnn_rnn_layer_backward.default: _recurrent_backward,
}
_ON_GPU: dict[Any, Callable[..., Any]] = {
    aten._grouped_mm.default: _grouped,
    aten.log_sigmoid_forward.default: _log_sigmoid,
}


_CHUNK = 65536
"""Elements that a block of threads reduces in ``_foreach_norm``: ``kChunkSize`` in MultiTensorApply.cuh."""

Memory: TypeAlias = Tensor | int | Reduction | slice
"""What a kernel takes: a result, or bytes or the scratch of a reduction until it returns. A slice frees these
by their places before."""
Kernel = Callable[..., Iterable[Memory]]
"""Returns what the kernel of an operator takes, in its order, given its results and its arguments."""


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
    """Return what an operator takes on a GPU; None if its results are all."""
    return _KERNELS.get(func)


def _results(out: Any) -> list[Tensor]:
    return [one for one in (out if isinstance(out, tuple | list) else [out]) if isinstance(one, Tensor)]


def _after(scratch: Kernel) -> Kernel:
    """Return the kernel that takes its results, and then scratch."""
    return lambda out, *args: chain(_results(out), scratch(out, *args))


def _before(scratch: Kernel) -> Kernel:
    """Return the kernel that takes scratch, and then its results."""
    return lambda out, *args: chain(scratch(out, *args), _results(out))


def _reduction(x: Tensor, out: Tensor, dims: Collection[int], kind: _Kind) -> Reduction:
    """Describe the reduction of a tensor over some of its dimensions."""
    strides = iter(out.stride()) if out.dim() != x.dim() else None
    dimensions = []
    for at, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        own = 0 if at in dims else (out.stride(at) if strides is None else next(strides))
        dimensions.append(Dimension(size, stride * x.element_size(), own * out.element_size()))
    offset = int(x.storage_offset())
    return Reduction(x.element_size(), kind.sum_bytes(x.dtype), kind.vector, offset, tuple(dimensions))


def _sum_of_all(x: Tensor) -> Reduction:
    return _reduction(x, x.new_empty(()), range(x.dim()), _SUM)


def _reduces(kind: _Kind, *, casts: bool = False) -> Kernel:
    """Return the kernel of a reduction whose second argument is its dimensions.

    Args:
        kind: of the reduction.
        casts: True if the input is copied to the type of the result first, unless that only widens 16 bits.
    """

    def scratch(out: Any, x: Tensor, dims: Any = None, *_: Any) -> Iterator[Memory]:
        out = out[0] if isinstance(out, tuple | list) else out
        if not x.numel():
            return
        listed = dims if isinstance(dims, list | tuple) else [] if dims is None else [dims]
        reduced = {dim % max(x.dim(), 1) for dim in listed or range(x.dim())}
        widens = x.dtype in LOW_PRECISION and out.dtype is torch.float32
        if casts and out.dtype != x.dtype and not widens:
            x = torch.empty_like(x, dtype=out.dtype)
            yield x.nbytes
        yield _reduction(x, out, reduced, kind)

    return _after(scratch)


_SUMS = _reduces(_SUM, casts=True)


def _norm(out: Any, x: Tensor, _: Any = 2, dims: Any = None, *__: Any) -> Iterable[Memory]:
    return _SUMS(out, x, dims)


def _elements(x: Tensor, y: Tensor) -> Tensor:
    """Return a fake of one value for each element of a loss."""
    shape = torch.broadcast_shapes(x.shape, y.shape)  # type: ignore[no-untyped-call]
    return torch.empty(shape, dtype=x.dtype, device=x.device)


def _loss(kept: Callable[[Tensor], int]) -> Kernel:
    """Return the kernel of a loss that sums its elements, given what of them it takes beside its result."""

    def scratch(out: Tensor, x: Tensor, y: Tensor, *_: Any) -> Iterator[Memory]:
        each = _elements(x, y)
        if out.dim() == 0 and each.dim():
            yield kept(each)
            yield _sum_of_all(each)

    return _after(scratch)


def _huber_loss(out: Tensor, x: Tensor, y: Tensor, reduction: int = 1, *_: Any) -> list[Memory]:
    each = _elements(x, y)
    return [each.nbytes, out, _sum_of_all(each)] if reduction else [out]


def _partial_norms(_: Any, tensors: Sequence[Tensor], *__: Any) -> Iterator[Memory]:
    """Yield the partial norms of many tensors, one for each chunk of each (ForeachReduceOp.cu)."""
    chunks = max((-(-x.numel() // _CHUNK) for x in tensors), default=0)
    if chunks:
        yield len(tensors) * chunks * _wide(next(x.dtype for x in tensors if x.numel()))


def _group_norm(out: Any, x: Tensor, weight: Any, bias: Any, *sizes: int) -> Iterator[Memory]:
    """Yield a factor and a term for each channel of each sample, beside statistics (group_norm_kernel.cu)."""
    samples, channels, _, groups, *_rest = sizes
    yield from _copies(x)
    yield from _results(out)
    yield from [samples * groups * 4] * 2 * (x.dtype in LOW_PRECISION)
    yield from [samples * channels * _wide(x.dtype)] * 2 * (weight is not None or bias is not None)


def _group_norm_backward(_: Any, *args: Any) -> Iterator[Memory]:
    """Yield the sums of each channel and the factors of each group."""
    x, weight, samples, channels, groups = args[1], args[4], args[5], args[6], args[8]
    item = _wide(x.dtype)
    yield from [samples * channels * item] * 2
    yield from [samples * groups * item] * 2
    if weight is not None:
        yield samples * channels * item


def _bias_gradient(out: Any, grad: Tensor, *_: Any) -> Iterator[Memory]:
    """Yield the sum behind the gradient of a convolution's bias, over all but channels."""
    bias = out[2]
    if bias is not None and grad.numel():
        yield _reduction(grad, bias, {*range(grad.dim())} - {1}, _SUM)


def _efficient_attention_backward(out: Any, grad: Tensor, query: Tensor, *_: Any) -> Iterator[Memory]:
    """Yield `efficient_scratch`; fp32 forms the product of output and gradient first."""
    delta, workspace = efficient_scratch(query)
    yield from _copies(grad.transpose(1, 2))
    yield from _results(out)
    if query.dtype is torch.float32:
        yield query.nbytes
        yield delta
    yield delta
    if query.dtype is torch.float32:
        yield slice(-3, -1)
    yield workspace


def _flash_attention(out: Any, *args: Any) -> list[Memory]:
    """Return the results, with the state of the dropout twice, once for a moment."""
    if len(args) < 4 or not args[3]:
        return [*_results(out)]
    state, unused = out[6:8]
    return [*out[:2], state.nbytes, unused, state]


def _flash_attention_backward(out: Any, *args: Any) -> Iterator[Memory]:
    """Yield copies in which lengths come before heads, and `flash_scratch` (flash_attn/flash_api.cpp)."""
    yield from _copies(args[0].transpose(1, 2), args[4].transpose(1, 2))
    yield from _results(out)
    yield from flash_scratch(args[1], args[2])


def _cudnn_attention_backward(_: Any, __: Tensor, query: Tensor, *___: Any) -> Iterator[Memory]:
    """Yield the row sums of output times gradient, and an accumulator for the gradient of the query.

    That is as far as cudnn-frontend knows the workspace of cuDNN.
    """
    batch, heads, length, head = query.shape
    yield 4 * batch * heads * length * (1 + head)


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


def _copies(*tensors: Tensor, any_format: bool = False) -> Iterator[Memory]:
    """Yield the bytes of tensors that are not contiguous; channels may be last if ``any_format``."""
    for x in tensors:
        is_channels_last = any_format and x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
        if not x.is_contiguous() and not is_channels_last:
            yield x.nbytes


def _copying(*places: int, any_format: bool = False) -> Kernel:
    """Return copies of the arguments in these places, unless they are contiguous."""
    return lambda _, *args: _copies(*(args[place] for place in places), any_format=any_format)


def _log_sum_exp(out: Tensor, x: Tensor, *_: Any) -> list[Memory]:
    """Return the largest values with a mask, and the exponentials (ATen/native/ReduceOps.cpp)."""
    return [out.nbytes, out.nbytes, out.numel(), slice(-2, None), x.nbytes, out]


def _batch_norm_backward(out: Any, grad: Tensor, x: Tensor, *_: Any) -> Iterator[Memory]:
    """Yield two sums and the gradients of weight and bias before that of the input (cuda/Normalization.cu).

    cuDNN runs the batch norms of images, and needs a gradient that is contiguous.
    """
    if x.dim() == 2:
        yield from [4 * x.shape[1]] * 2
        yield from _results((*out[1:], out[0]))
    else:
        yield from _copies(grad, any_format=True)
        yield from _results(out)


_TABLE: tuple[tuple[Kernel, str], ...] = (
    (_SUMS, "sum sum.dim_IntList nansum mean mean.dim"),
    (_norm, "linalg_vector_norm"),
    (_reduces(_MOMENTS), "var.correction std.correction var_mean.correction std_mean.correction"),
    (_reduces(_SAME), "amax amin max min"),
    (_reduces(_INDEXED), "max.dim min.dim argmax argmin"),
    (_reduces(_BOOLEAN), "any any.dim all all.dim"),
    (_loss(lambda each: each.nbytes), "mse_loss smooth_l1_loss"),
    (_loss(Tensor.element_size), "binary_cross_entropy soft_margin_loss"),
    (_huber_loss, "huber_loss"),
    (_before(_partial_norms), "_foreach_norm.Scalar"),
    (_group_norm, "native_group_norm"),
    (_after(_group_norm_backward), "native_group_norm_backward"),
    (_after(_bias_gradient), "convolution_backward"),
    (_batch_norm_backward, "native_batch_norm_backward"),
    (_after(lambda _, grad, *__: [grad.nbytes]), "_softmax_backward_data"),
    (_log_sum_exp, "logsumexp"),
    (_before(_copying(0)), "native_layer_norm embedding_dense_backward"),
    (_before(_copying(0, 1)), "native_layer_norm_backward"),
    # The backward passes copy a gradient that is a part of another one, as of a concatenation.
    (
        _after(_copying(0)),
        """
        _softmax _log_softmax _log_softmax_backward_data upsample_nearest1d_backward
        upsample_nearest3d_backward _upsample_nearest_exact1d_backward _upsample_nearest_exact3d_backward
        upsample_linear1d_backward upsample_trilinear3d_backward upsample_bicubic2d_backward
        _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward avg_pool3d_backward
        _adaptive_avg_pool2d_backward adaptive_max_pool2d_backward max_pool3d_with_indices_backward
        reflection_pad2d_backward
        """,
    ),
    (
        _after(_copying(0, any_format=True)),
        """
        upsample_nearest2d_backward _upsample_nearest_exact2d_backward upsample_bilinear2d_backward
        avg_pool2d_backward max_pool2d_with_indices_backward
        """,
    ),
    (lambda out, *_: [*out[6:8], *out[:2]], "_scaled_dot_product_cudnn_attention"),  # seeds come first
    (_after(_cudnn_attention_backward), "_scaled_dot_product_cudnn_attention_backward"),
    (lambda out, *_: out[:2], "_scaled_dot_product_efficient_attention"),  # its seeds are on the host
    (_efficient_attention_backward, "_scaled_dot_product_efficient_attention_backward"),
    (_flash_attention, "_scaled_dot_product_flash_attention"),
    (_flash_attention_backward, "_scaled_dot_product_flash_attention_backward"),
)
_KERNELS = {operator: kernel for kernel, names in _TABLE for operator in operators(names)}
