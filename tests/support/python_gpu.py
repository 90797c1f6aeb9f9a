"""A GPU made of CPU tensors, for tests of everything that depends on the device of a tensor.

A tensor of it computes on the CPU, says that it is on ``cuda:0``, and meets no tensor of the CPU, as on CUDA.
Memory is counted per storage in blocks of 512 bytes, up to the cap of the process. The GPU has no kernels of
its own, no autocast, no streams (nothing is asynchronous), and no allocator that fragments.

Use it in a process of its own: torch remembers for ever that CUDA was initialized.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from autobatch.core.units import MiB
from autobatch.device import nvml
from autobatch.device.nvml import NvmlAbsent
from autobatch.training import checkpoint

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
READ_THE_MEMORY = (Tensor.tolist, Tensor.untyped_storage, Tensor.storage, Tensor.data_ptr)
"""Methods that read memory past all dispatch."""
BLOCK = 512
MOVES = ("aten::copy_", "aten::_to_copy")
"""Operators that may have tensors on both devices."""
Operator = Callable[..., Any]


class PythonGpu:
    """The memory of the GPU, and the operators that run on it.

    Args:
        total_bytes: its memory.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = self.allowed_bytes = total_bytes
        self.used_bytes = self.peak_bytes = 0
        self.is_initialized = False
        self._storages: set[int] = set()

    def run(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator on the CPU, and put its results where CUDA would have them.

        Raises:
            RuntimeError: its tensors are on two devices.
            torch.OutOfMemoryError: a result does not fit.
        """
        name = operator._schema.name
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_gpu = [isinstance(one, GpuTensor) for one in tensors]
        if any(on_gpu) and name not in MOVES:
            # CUDA takes a number of the CPU, but no other tensor.
            others = [one for one, is_there in zip(tensors, on_gpu, strict=True) if not is_there]
            if any(one.dim() > 0 for one in others):
                raise RuntimeError(
                    f"Expected all tensors to be on the same device: {name} got cuda:0 and cpu"
                )
        is_here = on_gpu[0] if name == "aten::copy_" else any(on_gpu)
        if kwargs.get("device") is not None:
            is_here = torch.device(kwargs["device"]).type == "cuda"
            kwargs = {**kwargs, "device": CPU}
        inner_args, inner_kwargs = tree_map_only(GpuTensor, lambda one: one.inner, (args, kwargs))
        found = operator(*inner_args, **inner_kwargs)
        # An operator in place returns its argument.
        owners = {id(one.inner): one for one in tensors if isinstance(one, GpuTensor)}

        def place(one: Tensor) -> Tensor:
            return owners[id(one)] if id(one) in owners else self._take(one) if is_here else one

        return tree_map_only(Tensor, place, found)

    def _take(self, found: Tensor) -> GpuTensor:
        storage = found.untyped_storage()
        if storage._cdata not in self._storages:
            size = -(-storage.nbytes() // BLOCK) * BLOCK
            if self.used_bytes + size > self.allowed_bytes:
                free = max(0, self.allowed_bytes - self.used_bytes)
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {size} bytes. GPU 0 has a total capacity of "
                    f"{self.total_bytes} bytes of which {free} bytes is free."
                )
            self.used_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            self._storages.add(storage._cdata)
            weakref.finalize(storage, self._free, storage._cdata, size)
        return GpuTensor(found)

    def _free(self, storage: int, size: int) -> None:
        self._storages.discard(storage)
        self.used_bytes -= size

    def functions(self) -> dict[str, Operator]:
        """Return the functions of ``torch.cuda`` that this GPU answers."""
        properties = SimpleNamespace(
            name="Python GPU",
            total_memory=self.total_bytes,
            is_integrated=0,
            uuid="p1",
            major=8,
            minor=0,
            multi_processor_count=1,
            max_threads_per_multi_processor=2048,
        )
        return {
            "_lazy_init": self._initialize,
            "is_available": lambda: True,
            "is_initialized": lambda: self.is_initialized,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "synchronize": lambda *_: self._initialize(),
            "get_device_properties": lambda *_: properties,
            "memory_allocated": lambda *_: self.used_bytes,
            "memory_reserved": lambda *_: self.used_bytes,
            "memory_stats_as_nested_dict": lambda *_: self._stats(),
            "reset_peak_memory_stats": lambda *_: setattr(self, "peak_bytes", self.used_bytes),
            "empty_cache": lambda: None,
            "mem_get_info": lambda *_: (self.total_bytes - self.used_bytes, self.total_bytes),
            "set_per_process_memory_fraction": self._allow,
            "get_per_process_memory_fraction": lambda *_: self.allowed_bytes / self.total_bytes,
            "get_allocator_backend": lambda: "native",
            # Its random numbers are those of the CPU.
            "get_rng_state_all": lambda: [torch.zeros(16, dtype=torch.uint8)],
            "set_rng_state_all": lambda _: None,
            "manual_seed_all": lambda _: None,
            "manual_seed": lambda _: None,
            "device": lambda _: nullcontext(),
        }

    def _initialize(self) -> None:
        self.is_initialized = True

    def _allow(self, share: float, _: int) -> None:
        self.allowed_bytes = int(share * self.total_bytes)

    def _stats(self) -> dict[str, Any]:
        figures = {"all": {"current": self.used_bytes, "peak": self.peak_bytes}}
        return {"allocated_bytes": figures, "reserved_bytes": figures, "num_alloc_retries": 0}


def _on_the_cpu(map_leaves: Operator) -> Operator:
    def changed(value: Any, change: Operator, place: str = "") -> Any:
        return map_leaves(
            value,
            lambda at, leaf: change(at, leaf.inner if isinstance(leaf, GpuTensor) else leaf),
            place,
        )

    return changed


@contextmanager
def python_gpu(total_bytes: int = 64 * MiB) -> Iterator[PythonGpu]:
    """Let torch have this GPU, and no other, within the block."""
    gpu = PythonGpu(total_bytes)
    with ExitStack() as stack:
        for name, function in gpu.functions().items():
            stack.enter_context(patch.object(torch.cuda, name, function))
        # A device records nothing with this option, so that predictions come from peaks.
        stack.enter_context(patch.dict("os.environ", PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:512"))
        # A build for CUDA would let the driver pin the memory of a loader.
        stack.enter_context(patch.object(torch.accelerator, "is_available", lambda: False))
        # A build for CUDA asks the driver whether a graph is recorded.
        recorded = "_accelerator_graph_capture_health_check"
        stack.enter_context(patch.object(torch.optim.Optimizer, recorded, lambda _: None))
        stack.enter_context(patch.object(torch.accelerator, "empty_host_cache", lambda: None, create=True))
        stack.enter_context(patch.object(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, create=True))
        stack.enter_context(patch.object(nvml, "read_gpu", lambda *_: NvmlAbsent(reason="not installed")))
        # A checkpoint has the values on the CPU.
        stack.enter_context(patch.object(checkpoint, "map_leaves", _on_the_cpu(checkpoint.map_leaves)))
        stack.enter_context(_Dispatch(gpu))
        stack.enter_context(Functions())
        yield gpu


class _Dispatch(TorchDispatchMode):
    """All operators within the block."""

    def __init__(self, gpu: PythonGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._gpu.run(operator, args, kwargs or {})


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
