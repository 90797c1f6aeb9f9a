"""Operators on fakes in less time than torch's mode of fakes takes, with the same results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

aten = torch.ops.aten


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
