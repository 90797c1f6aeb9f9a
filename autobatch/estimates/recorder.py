"""Fakes of a model and of a batch, and a mode that records a step on them: allocations, phases and modules.

Some operators need values that fakes do not have. They get values with which the step succeeds and is not
smaller than any real one: nothing overflows, and a selection by values keeps everything.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from itertools import zip_longest
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.device.allocator.tracker import UPDATES, StorageTracker, has_wrappers

aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
"""Called more often than all other operators together, because autograd calls it for every fake."""
_QUERIES = frozenset({_DEVICE, aten._local_scalar_dense.default})
_OVERFLOW_CHECK = aten._amp_foreach_non_finite_check_and_unscale_.default
_CHECK = aten._is_all_true.default
"""The check of the arguments of a distribution."""
_PASSED = "_passed_a_check"
"""Attribute of the result of a check."""
_SELECTIONS = frozenset({aten.nonzero.default, aten.masked_select.default, aten.index.Tensor})
"""Operators whose result has a size that depends on values."""
_REDUCED = {
    aten.mse_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.soft_margin_loss.default: 2,
    aten.binary_cross_entropy.default: 3,
}
"""Losses that write one value per element into their result and then shrink it to one number, with the index
of their reduction argument. The storage keeps its size (ATen/native/Loss.cpp), which fakes do not show."""
_WAIT = "_c10d_functional::wait_tensor"
"""Returns its argument; the fake one has a storage of its own."""
CONVOLUTIONS = "convolutions: no trace shows the scratch memory of cuDNN, so the interval allows 10 % for it"
SELECTIONS = "selections by values: predicted as if they kept everything, which is their largest result"


class Recorder(StorageTracker):  # type: ignore[no-untyped-call]
    """A storage tracker for fakes that supplies missing values."""

    def __init__(self, *, on_gpu: bool) -> None:
        super().__init__(CountingAllocator(), storage_device="meta")
        self._on_gpu = on_gpu
        self.notes: set[str] = set()
        """Remarks on what the trace does not show."""
        self._found_inf: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator on fakes; see the class."""
        if has_wrappers(types):
            return self._on_wrapper(func, args, kwargs)
        if func in _QUERIES:
            return args[0].fake_device if func is _DEVICE else self._value_of(args[0])
        if _is_in_place_foreach(func):
            return None
        is_update = func in UPDATES and type(args[0]) is FakeTensor and args[0].layout is torch.strided
        if is_update or func.name() == _WAIT:
            # Running an update on fakes takes half of an optimizer step.
            self.settle()
            return args[0]
        if self._on_gpu and func is aten.lift_fresh.default:
            # ``torch.tensor(1.0)`` without a device is on the host, with a GPU too.
            return func(*args, **(kwargs or {}))
        if func is aten.convolution.default:
            self.notes.add(CONVOLUTIONS)
        elif func is _OVERFLOW_CHECK:
            self._found_inf.add(args[1].untyped_storage()._cdata)
        elif func in _SELECTIONS:
            func, args, kwargs = self._select_all(func, args)
        if func in _REDUCED and (args[_REDUCED[func]] if len(args) > _REDUCED[func] else 1):
            func = _loss_per_element
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func is _CHECK:
            vars(out)[_PASSED] = True
        return out

    def _on_wrapper(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Run an operator on tensors that wrap others, such as those sharded over ranks."""
        if _is_in_place_foreach(func):
            return None
        if func not in _QUERIES and not self._aside:
            # Once unseen: the first call also makes fakes of the size of whole tensors, for their shapes.
            func(*args, **(kwargs or {}))
        return NotImplemented

    def _value_of(self, tensor: Tensor) -> float | int | bool:
        """Return a value for ``.item()`` with which a step succeeds: no overflow, valid values, 1 of each."""
        if tensor.untyped_storage()._cdata in self._found_inf:
            return 0.0
        # Torch computes with single numbers of the user's code.
        value = tensor.constant if isinstance(tensor, FakeTensor) else None
        if value is not None and not value.is_floating_point():
            with no_dispatch():
                return value.item()
        if tensor.dtype is torch.bool:
            return _PASSED in vars(tensor)
        # Neither 0 nor 1, because optimizers divide by a value and by its difference from 1.
        return 0.5 if tensor.is_floating_point() else 1

    def _select_all(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Return operator and arguments of a selection that keeps everything."""
        x, numbers = args[0], {"dtype": torch.int64, "device": torch.device("cpu")}
        empty = aten.empty.memory_format
        if func is aten.nonzero.default:
            self.notes.add(SELECTIONS)
            return empty, ([x.numel(), x.dim()],), numbers
        if func is aten.masked_select.default:
            self.notes.add(SELECTIONS)
            size = prod(map(max, zip_longest(x.shape[::-1], args[1].shape[::-1], fillvalue=1)))
            return empty, ([size],), numbers | {"dtype": x.dtype}
        indices: list[Tensor | None] = []
        for index in args[1]:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                self.notes.add(SELECTIONS)
                # The operator allocates whole numbers unseen, one for each dimension.
                make = super().__torch_dispatch__
                indices += [make(empty, (), ([index.numel()],), numbers) for _ in range(index.dim())]
            else:
                indices.append(index)
        return func, (x, indices, *args[2:]), {}


def _is_in_place_foreach(func: Any) -> bool:
    """Check for an operator in place over hundreds of tensors, which allocates nothing and takes long."""
    name: str = func._schema.name
    return name.startswith("aten::_foreach_") and name.endswith("_")


def _loss_per_element(x: Tensor, y: Tensor, *_: Any) -> Tensor:
    """Return one number in a storage with one element per pair of broadcast elements."""
    shape = torch.broadcast_shapes(x.shape, y.shape)  # type: ignore[no-untyped-call]
    each = torch.empty(shape, dtype=torch.promote_types(x.dtype, y.dtype), device=x.device)
    one: Tensor = aten.as_strided.default(each, [], [])
    return one


def fake_copy(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """Return a fake CPU tensor with the same shape, strides and type; a parameter if it is one."""
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)


def fake_model(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Return a copy of a model with fake tensors, in which tied tensors stay tied.

    Raises:
        Exception: a module of the user's cannot be copied.
    """
    model = getattr(model, "_orig_mod", model)  # the module itself, if the model is compiled
    tensors = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        tensors += [value for value in vars(module).values() if isinstance(value, Tensor)]
        tensors += [p.grad for p in module.parameters(recurse=False) if p.grad is not None]
    # deepcopy takes copies from its memo, so it never reads a tensor.
    memo: dict[int, Any] = {id(tensor): fake_copy(tensor, mode) for tensor in tensors}
    return copy.deepcopy(model, memo)


def fake_batch(batch: Any, mode: FakeTensorMode) -> Any:
    """Return a batch with fake tensors in its tuples, lists, mappings, and attributes of objects."""
    if isinstance(batch, Tensor):
        return fake_copy(batch, mode)
    if isinstance(batch, MutableMapping):
        made = copy.copy(batch)
        for key, value in batch.items():
            made[key] = fake_batch(value, mode)
        return made
    if isinstance(batch, Mapping):
        return {key: fake_batch(value, mode) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        fakes = [fake_batch(value, mode) for value in batch]
        return type(batch)(*fakes) if hasattr(batch, "_fields") else type(batch)(fakes)
    if hasattr(batch, "__dict__") and not isinstance(batch, type | nn.Module):
        made = copy.copy(batch)
        # Past a ``__setattr__`` of its own, which may put attributes elsewhere, as that of a graph does.
        for name, value in list(vars(made).items()):
            if isinstance(value, Tensor | Mapping | list | tuple):
                vars(made)[name] = fake_batch(value, mode)
        return made
    return batch
