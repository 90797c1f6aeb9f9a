"""Nested micro-batches: their tensors, and their way to the device."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from autobatch.workload.nested import to_device
from tests.support.kernels import needs_kernels

CPU, CUDA, META = torch.device("cpu"), torch.device("cuda", 0), torch.device("meta")
Pair = namedtuple("Pair", ["left", "right"])


def test_tensors_and_objects_move_to_the_device() -> None:
    a, b, c, d = torch.arange(4.0).split(1)
    before = OrderedDict(pair=Pair(a, [b]), rest=(c, {"d": d}), name="n", none=None, count=3)
    after, moved = to_device([before, pack_sequence([torch.ones(2)])], META)
    assert isinstance(moved, PackedSequence)
    assert (type(after), type(after["pair"]), type(after["rest"])) == (OrderedDict, Pair, tuple)
    tensors = [moved.data, after["pair"].left, *after["pair"].right, after["rest"][0], after["rest"][1]["d"]]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert before["pair"].left is a, "the batch itself stays on the host"
    assert (after["name"], after["none"], after["count"]) == ("n", None, 3)
    assert to_device(before, CPU) is before


class Copied(torch.Tensor):
    """A tensor of the host that writes down how it goes to a GPU."""

    log: list[str] = []
    pinned, has_room = False, True

    def is_pinned(self) -> bool:
        return self.pinned

    def pin_memory(self) -> Any:
        if not self.has_room:
            raise RuntimeError("CUDA error: out of memory")
        self.log.append("pin")
        return self

    def contiguous(self) -> Any:
        self.log.append("copy")
        return self

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Any:
        self.log.append(f"{device} {non_blocking}")
        return self


@pytest.mark.parametrize(
    ("change", "is_pinned", "has_room", "way"),
    [
        (lambda x: x.transpose(0, 1), False, True, ["pin"]),
        (lambda x: x.transpose(0, 1), True, True, []),
        (lambda x: x, False, False, []),
        # torch would close the gaps in ordinary memory, from which the host waits (native/cuda/Copy.cu).
        (lambda x: x[:, :-1], True, True, ["copy", "pin"]),
        (lambda x: x[:1].expand(3, 4, 5), False, True, ["copy", "pin"]),
    ],
)
def test_tensors_go_to_a_gpu_from_pinned_memory_without_gaps(
    monkeypatch, change, is_pinned: bool, has_room: bool, way: list[str]
) -> None:
    monkeypatch.setattr(Copied, "log", [])
    monkeypatch.setattr(Copied, "pinned", is_pinned)
    monkeypatch.setattr(Copied, "has_room", has_room)
    to_device({"x": change(torch.ones(3, 4, 5)).as_subclass(Copied)}, CUDA)
    assert Copied.log == [*way, "cuda:0 True"]


class Encoding(UserDict):
    """A mapping with a method ``to`` of its own that cannot pin itself, as transformers' BatchEncoding."""

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Encoding:
        return Encoding({key: value.to(device, non_blocking=non_blocking) for key, value in self.items()})


class Graph:
    """An object with a method ``to`` of its own, as torch_geometric and transformers have them."""

    def __init__(self, *, waits: bool) -> None:
        self.waits, self.log = waits, []

    def pin_memory(self) -> Graph:
        self.log.append("pin")
        return self

    def to(self, device: torch.device, **options: bool) -> Graph:
        if self.waits and options:
            raise TypeError("unexpected keyword")
        self.log.append(f"{device} {options.get('non_blocking', False)}")
        return self


def test_objects_go_to_a_gpu_as_their_methods_allow(monkeypatch) -> None:
    monkeypatch.setattr(Copied, "log", [])
    assert isinstance(to_device(Encoding(ids=torch.ones(2).as_subclass(Copied)), CUDA), Encoding)
    assert Copied.log == ["pin", "cuda:0 True"]
    assert to_device(Graph(waits=False), CUDA).log == ["pin", "cuda:0 True"]
    assert to_device(Graph(waits=True), CUDA).log == ["pin", "cuda:0 False"]
    assert to_device(Graph(waits=False), META).log == ["meta True"]


@pytest.mark.gpu
@needs_kernels
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_host_does_not_wait_for_a_busy_gpu() -> None:
    # The first has gaps, as the texts and the next words of a language model.
    batch = [torch.ones(1 << 12, (1 << 10) + 1)[:, 1:], pack_sequence([torch.ones(1 << 22)])]
    to_device(batch, CUDA)  # allocates the pinned memory
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    moved = to_device(batch, CUDA)
    assert not torch.cuda.current_stream().query(), "the host waited for the GPU"
    assert moved[0].sum().item() == moved[1].data.sum().item() == 1 << 22
