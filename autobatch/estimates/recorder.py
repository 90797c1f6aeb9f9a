"""A dispatch mode that records a training step on fake tensors: its allocations, phases and modules.

Some operators need values that fakes do not have. They get values with which the step succeeds and is not
smaller than any real one: nothing overflows, and a selection by values keeps everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.device.allocator.trace import Trace
from autobatch.device.allocator.tracker import UPDATES, StorageTracker, has_wrappers
from autobatch.estimates.fakes import known_values

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
_MASKS = (torch.bool, torch.uint8)
_WAIT = "_c10d_functional::wait_tensor"
"""Returns its argument; the fake one has a storage of its own."""
CONVOLUTIONS = "convolutions: no trace shows the scratch memory of cuDNN, so the interval allows 10 % for it"
SELECTIONS = "selections by values: predicted as if they kept everything, which is their largest result"


class Recorder(StorageTracker):  # type: ignore[no-untyped-call]
    """A storage tracker for fakes that supplies missing values.

    Args:
        on_gpu: record the step of a GPU.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        super().__init__(CountingAllocator(), storage_device="meta")
        self._on_gpu = on_gpu
        self.notes: set[str] = set()
        """Remarks on what the trace does not show."""
        self._found_inf: set[int] = set()

    def recording(self) -> Trace:
        """Return the trace, outside of the mode; blocks are numbered in the order of their allocation."""
        return Trace(tuple(self.events), tuple(self._marks), tuple(self._modules)).canonical()

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
            func, args, kwargs = self._select_all(func, args, kwargs)
        if func in _REDUCED and (args[_REDUCED[func]] if len(args) > _REDUCED[func] else 1):
            func = _loss_per_element
        elif func is aten._grouped_mm.default:
            func = _grouped_product
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
        value = known_values(tensor)
        if value is not None:
            with no_dispatch():
                return value.item()
        if tensor.dtype is torch.bool:
            return _PASSED in vars(tensor)
        # Neither 0 nor 1, because optimizers divide by a value and by its difference from 1.
        return 0.5 if tensor.is_floating_point() else 1

    def _select_all(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any] | None]:
        """Return operator and arguments of a selection that keeps everything."""
        x = args[0]
        if func is aten.nonzero.default:
            self.notes.add(SELECTIONS)
            return aten.empty.memory_format, ([x.numel(), x.dim()],), _on_cpu(torch.int64)
        if func is aten.masked_select.default:
            self.notes.add(SELECTIONS)
            size = prod(map(max, zip_longest(x.shape[::-1], args[1].shape[::-1], fillvalue=1)))
            return aten.empty.memory_format, ([size],), _on_cpu(x.dtype)
        indices: list[Tensor | None] = []
        for index in args[1]:
            if index is not None and index.dtype in _MASKS:
                self.notes.add(SELECTIONS)
                indices += [self._whole_numbers([index.numel()]) for _ in range(index.dim())]
            else:
                indices.append(index)
        return func, (x, indices, *args[2:]), kwargs

    def _whole_numbers(self, shape: Sequence[int]) -> Tensor:
        """Count indices that an operator allocates unseen."""
        made: Tensor = super().__torch_dispatch__(
            aten.empty.memory_format, (), (shape,), _on_cpu(torch.int64)
        )
        return made


def _is_in_place_foreach(func: Any) -> bool:
    """Check for an operator in place over hundreds of tensors, which allocates nothing and takes long."""
    name: str = func._schema.name
    return name.startswith("aten::_foreach_") and name.endswith("_")


def _grouped_product(a: Tensor, b: Tensor, offsets: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Return products of groups of rows, as experts have them, of any type: torch's own fake has one type.

    The kernel pads each row to 16 bytes (ATen/native/GroupedMMUtils.h).
    """
    groups = [len(offsets)] if a.dim() == b.dim() == 2 and offsets is not None else []
    batch = [len(a)] if a.dim() == b.dim() == 3 else groups
    columns, step = b.shape[-1], 16 // a.element_size()
    return a.new_empty([*batch, a.shape[-2], -(-columns // step) * step])[..., :columns]


def _loss_per_element(x: Tensor, y: Tensor, *_: Any) -> Tensor:
    """Return one number in a storage with one element per pair of broadcast elements."""
    shape = torch.broadcast_shapes(x.shape, y.shape)  # type: ignore[no-untyped-call]
    each = torch.empty(shape, dtype=torch.promote_types(x.dtype, y.dtype), device=x.device)
    one: Tensor = aten.as_strided.default(each, [], [])
    return one


def _on_cpu(dtype: torch.dtype) -> dict[str, Any]:
    return {"dtype": dtype, "device": torch.device("cpu")}
