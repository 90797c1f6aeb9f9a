"""Tensors of `tests.support.python_gpu`, and the functions that torch answers before any operator runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
READ_THE_MEMORY = (Tensor.tolist, Tensor.untyped_storage, Tensor.storage, Tensor.data_ptr)
"""Methods that read memory past all dispatch."""


class GpuTensor(Tensor):
    """A tensor on the GPU. To torch's own code it is on the CPU, or autograd would ask for a driver."""

    inner: Tensor
    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    @staticmethod
    def __new__(cls, inner: Tensor) -> GpuTensor:
        made = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=CPU,
        )
        made.inner = inner
        return made

    def __repr__(self, **_: Any) -> str:
        return f"{self.inner!r} on {CUDA}"

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{operator} ran outside of the GPU's block")


class Functions(TorchFunctionMode):
    """Functions that torch answers before any operator runs."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (Tensor.to, Tensor.cpu, Tensor.cuda):
            return _moved(function, *args, **kwargs)
        if function == Tensor.data.__set__:  # type: ignore[attr-defined]
            return _set_data(*args)
        if function in READ_THE_MEMORY and isinstance(args[0], GpuTensor):
            return function(args[0].inner)
        if function is Tensor.pin_memory:
            return args[0].clone()
        return function(*args, **kwargs)


def _moved(function: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Call ``to`` or its short forms: torch itself sees no difference between the devices."""
    like = [one for one in [*args, kwargs.get("other")] if isinstance(one, Tensor)]
    named = [one for one in [*args, kwargs.get("device")] if isinstance(one, torch.device | str)]
    device = torch.device(named[0]) if named else like[0].device if like else tensor.device
    if function is not Tensor.to:
        device = CPU if function is Tensor.cpu else CUDA
    types = [one for one in [*args, kwargs.get("dtype")] if isinstance(one, torch.dtype)]
    dtype = types[0] if types else like[0].dtype if like else tensor.dtype
    if device.type == tensor.device.type and dtype == tensor.dtype and not kwargs.get("copy"):
        return tensor
    return torch.ops.aten._to_copy(tensor, dtype=dtype, device=device)  # type: ignore[no-any-return]


def _set_data(tensor: Tensor, data: Tensor) -> None:
    """Set ``tensor.data``, which may move it from one device to the other."""
    is_parameter = isinstance(tensor, nn.Parameter)
    Tensor.data.__set__(tensor, data)  # type: ignore[attr-defined]
    if isinstance(data, GpuTensor):
        tensor.__class__ = GpuTensor
        vars(tensor).update(inner=data.inner, **({"_is_param": True} if is_parameter else {}))
    elif isinstance(tensor, GpuTensor):
        tensor.__class__ = nn.Parameter if is_parameter else Tensor
        del vars(tensor)["inner"]
