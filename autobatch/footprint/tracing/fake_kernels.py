"""Operators on fakes with the storages that their kernels make, if torch's own fakes have others.

Each function takes the arguments of its operator, and calls others on fakes. A recorder counts the storages
of what it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

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
