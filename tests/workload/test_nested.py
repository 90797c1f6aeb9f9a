"""Nested micro-batches: their tensors, their way to the device, and a second pass over them."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from autobatch.workload.nested import rows_of, to_device
from tests.support.kernels import needs_kernels

CPU, CUDA, META = torch.device("cpu"), torch.device("cuda", 0), torch.device("meta")
Pair = namedtuple("Pair", ["left", "right"])


def numbers(*values: float) -> list[torch.Tensor]:
    return [torch.tensor([value]) for value in values]


def nested():
    a, b, c, d = numbers(1.0, 2.0, 3.0, 4.0)
    return OrderedDict(pair=Pair(a, [b]), rest=(c, {"d": d}), name="n", none=None, count=3)


def test_tensors_and_objects_move_to_the_device() -> None:
    packed = pack_sequence([torch.ones(2)])
    before = nested()
    after, moved = to_device([before, packed], META)
    assert isinstance(moved, PackedSequence)
    assert moved.data.device.type == "meta"
    assert (type(after), type(after["pair"]), type(after["rest"])) == (OrderedDict, Pair, tuple)
    tensors = [after["pair"].left, *after["pair"].right, after["rest"][0], after["rest"][1]["d"]]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert before["pair"].left.item() == 1.0, "the batch itself stays on the host"
    assert (after["name"], after["none"], after["count"]) == ("n", None, 3)
    assert to_device(before, CPU) is before


class Copied(torch.Tensor):
    """A tensor of the host that writes down how it goes to a GPU."""

    log: list[str] = []
    has_room = True

    def is_pinned(self) -> bool:
        return False

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


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return how copied tensors went to a GPU."""
    monkeypatch.setattr(Copied, "log", [])
    return Copied.log


@pytest.mark.parametrize(("has_room", "copies"), [(True, ["pin"]), (False, [])])
def test_tensors_go_to_a_gpu_from_pinned_memory(log, monkeypatch, has_room: bool, copies: list[str]) -> None:
    """From ordinary memory the host would wait until the GPU has finished the micro-batch before."""
    monkeypatch.setattr(Copied, "has_room", has_room)
    to_device({"x": torch.ones(2).as_subclass(Copied)}, CUDA)
    to_device([torch.ones(2).as_subclass(Copied)], META)
    assert log == [*copies, "cuda:0 True", "meta True"]


@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.parametrize(
    ("change", "has_gaps"),
    [
        (lambda x: x, False),
        (lambda x: x.transpose(0, 1), False),
        (lambda x: x[:1], False),
        (lambda x: x[:, :-1], True),
        (lambda x: x[:1].expand(3, 4, 5), True),
    ],
)
def test_gaps_are_closed_before_the_copy_even_in_pinned_memory(
    log, monkeypatch, change, has_gaps: bool, is_pinned: bool
) -> None:
    """torch would close them in ordinary memory, from which the host waits (native/cuda/Copy.cu)."""
    monkeypatch.setattr(Copied, "is_pinned", lambda _: is_pinned)
    to_device(change(torch.ones(3, 4, 5)).as_subclass(Copied), CUDA)
    assert log == [*(["copy"] * has_gaps), *(["pin"] * (has_gaps or not is_pinned)), "cuda:0 True"]


class Encoding(UserDict):
    """A mapping with a method ``to`` of its own that cannot pin itself, as transformers' BatchEncoding."""

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Encoding:
        return Encoding({key: value.to(device, non_blocking=non_blocking) for key, value in self.items()})


def test_mappings_with_a_method_to_are_pinned(log) -> None:
    batch = Encoding(ids=torch.ones(2).as_subclass(Copied))
    assert isinstance(to_device(batch, CUDA), Encoding)
    assert log == ["pin", "cuda:0 True"]
    assert set(batch) == {"ids"}


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


def test_objects_go_to_a_gpu_as_their_methods_allow() -> None:
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


@pytest.mark.parametrize(
    ("batch", "last"),
    [
        (Pair(["a", "b"], ("c", "d")), Pair("b", "d")),
        ([[1, 2], [3, 4]], [2, 4]),
        (
            {"ids": [[1, 2, 3], [4]], "turns": [[{"a": 1}], []], "y": [0, 1]},
            {"ids": [4], "turns": [], "y": 1},
        ),
        ({"pair": [("a", "b"), ("c", "d")]}, {"pair": ["b", "d"]}),
        (UserDict(x=np.array([[1, 2], [3, 4]]).tolist()), UserDict(x=[3, 4])),
    ],
    ids=["tuples", "a list at the top", "lists in a dict", "tuples in a list", "a mapping of its own"],
)
def test_a_batch_of_plain_values_is_taken_apart_by_samples(batch: Any, last: Any) -> None:
    found = rows_of(batch)
    assert (found[-1], type(found[-1])) == (last, type(last))


def test_rows_of_tensors_are_their_samples_in_any_container() -> None:
    batch = {"x": torch.arange(6).view(3, 2), "more": [np.arange(3), (torch.eye(3), ["a", "b", "c"])]}
    first, second, _ = rows_of(batch)
    assert second["x"].tolist() == [2, 3]
    assert second["more"][0] == 1
    assert second["more"][1][0].tolist() == [0, 1, 0]
    assert (first["more"][1][1], second["more"][1][1]) == ("a", "b")
