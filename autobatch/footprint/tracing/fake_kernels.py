"""Operators on fakes with the storages that their kernels make, if torch's own fakes have others.

Each function takes the arguments of its operator, and calls others on fakes. A recorder counts the storages
of what it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

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


def _overloads(*names: tuple[str, str]) -> frozenset[Any]:
    return frozenset(getattr(getattr(aten, name), overload) for name, overload in names)


_VIEWS = _overloads(
    ("view", "default"),
    ("_unsafe_view", "default"),
    ("as_strided", "default"),
    ("detach", "default"),
    ("t", "default"),
    ("transpose", "int"),
    ("slice", "Tensor"),
    ("select", "int"),
    ("unsqueeze", "default"),
    ("expand", "default"),
    ("permute", "default"),
    ("split", "Tensor"),
    ("split_with_sizes", "default"),
    ("unsafe_split", "Tensor"),
)
"""Operators that take no storage, and are half of all in a step."""
_PLAIN = _overloads(
    ("add", "Tensor"),
    ("sub", "Tensor"),
    ("mul", "Tensor"),
    ("mul", "Scalar"),
    ("div", "Tensor"),
    ("pow", "Tensor_Scalar"),
    ("neg", "default"),
    ("sqrt", "default"),
    ("rsqrt", "default"),
    ("sigmoid", "default"),
    ("tanh", "default"),
    ("relu", "default"),
    ("sigmoid_backward", "default"),
    ("tanh_backward", "default"),
    ("threshold_backward", "default"),
    ("mm", "default"),
    ("bmm", "default"),
    ("addmm", "default"),
    ("sum", "dim_IntList"),
    ("mean", "dim"),
    ("cat", "default"),
    ("_softmax", "default"),
    ("_softmax_backward_data", "default"),
)
"""Operators whose result is one new tensor, of a form that shapes, strides and types decide."""


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
    if func is aten._embedding_bag.default and not on_gpu:
        return _embedding_bag_on_cpu
    if func is aten._embedding_bag_backward.default and args[9]:
        return _sparse_gradient_of_bags
    if func is aten.native_batch_norm.default and args[0].dtype in LOW_PRECISION:
        return partial(_batch_norm, on_gpu=on_gpu)
    return _recurrent_backward if func is aten.mkldnn_rnn_layer_backward.default else func


class QuickKernels:
    """Functions that do the same as operators on fakes in less time, for one trace.

    One object stands for all calls of an operator, because a tracker keeps what it knows of each.
    """

    def __init__(self) -> None:
        self._known: dict[Any, _View | _Remembered] = {}

    def of(self, func: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        """Return the function for an operator; None for others."""
        known = self._known.get(func)
        if known is None and func in _VIEWS:
            known = self._known[func] = _View(func)
        elif known is None and func in _PLAIN:
            known = self._known[func] = _Remembered(func)
        if isinstance(known, _View) and (type(args[0]) is not FakeTensor or args[0].constant is not None):
            return None
        if known is None and func.namespace == "profiler":
            return partial(_unseen, func)
        return known


def _unseen(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator that has no tensors, past the mode of fakes."""
    with torch._C._DisableTorchDispatch():
        return func(*args, **kwargs)


class _View:
    """An operator that returns views of a fake, in a third of the time that its mode takes.

    Args:
        func: the operator.
    """

    def __init__(self, func: Any) -> None:
        self._func = func
        self._schema = func._schema
        """By which a tracker knows the kind of the operator."""

    def __call__(self, x: FakeTensor, *args: Any, **kwargs: Any) -> Any:
        mode = x.fake_mode
        with in_kernel_invocation_manager(mode):
            out = self._func(x, *args, **kwargs)
        if isinstance(out, Tensor):
            return FakeTensor(mode, out, x.fake_device)
        return [FakeTensor(mode, one, x.fake_device) for one in out]


class _Remembered:
    """An operator that runs once for each combination of shapes, and then takes a third of the time.

    Torch's mode of fakes remembers results too, by everything that any result may depend on.

    Args:
        func: the operator.
    """

    def __init__(self, func: Any) -> None:
        self._func = func
        self._schema = func._schema
        self._forms: dict[tuple[Any, ...], _Form] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = None if kwargs else _key_of(args)
        known = None if key is None else self._forms.get(key)
        if known is not None:
            return FakeTensor(known.mode, known.new(), known.device)
        out = self._func(*args, **kwargs)
        if key is not None and type(out) is FakeTensor and out.constant is None:
            form = _Form(out.shape, out.stride(), out.dtype, out.fake_mode, out.fake_device)
            # A kernel may take more than its result shows.
            if form.new().untyped_storage().nbytes() == out.untyped_storage().nbytes():
                self._forms[key] = form
        return out


class _Form(NamedTuple):
    """Everything that tells one fake from others."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    mode: FakeTensorMode
    device: torch.device

    def new(self) -> Tensor:
        """Return a new meta tensor, past any mode."""
        with torch._C._DisableTorchDispatch():
            return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


def _key_of(values: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return what the form of a result depends on; None if more than shapes, strides, types and devices."""
    key: list[Any] = []
    for value in values:
        if type(value) is FakeTensor:
            if value.constant is not None or value.layout is not torch.strided or value.dtype.is_complex:
                return None
            key.append((value.shape, value.stride(), value.dtype, value.fake_device))
        elif isinstance(value, list | tuple):
            inner = _key_of(value)
            if inner is None:
                return None
            key.append(inner)
        elif isinstance(value, Tensor):
            return None
        else:
            # 1, 1.0 and True are equal, and give results of different types.
            key.append((type(value), value))
    return tuple(key)


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
