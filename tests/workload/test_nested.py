"""Nested micro-batches: their tensors, their way to the device, and a second pass over them."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from autobatch.device.cpu import SilentMeter
from autobatch.workload.nested import Twice, feed, form_of, map_tensors, tensors_of, to_device

CPU, META = torch.device("cpu"), torch.device("meta")
Pair = namedtuple("Pair", ["left", "right"])


def numbers(*values: float) -> list[torch.Tensor]:
    return [torch.tensor([value]) for value in values]


def nested():
    a, b, c, d = numbers(1.0, 2.0, 3.0, 4.0)
    return OrderedDict(pair=Pair(a, [b]), rest=(c, {"d": d}), name="n", none=None, count=3)


class Counting(SilentMeter):
    """A meter that keeps what it counts, and what runs uncounted."""

    def __init__(self) -> None:
        self.counted: list[torch.Tensor] = []
        self.is_counting = True

    def count(self, tensors) -> None:
        assert self.is_counting
        self.counted += tensors

    @contextmanager
    def uncounted(self):
        self.is_counting = False
        yield
        self.is_counting = True


def test_every_tensor_is_found_in_order() -> None:
    assert [tensor.item() for tensor in tensors_of(nested())] == [1.0, 2.0, 3.0, 4.0]
    graph = SimpleNamespace(nodes=torch.ones(3), edges=[torch.ones(2)], label="x")
    assert [len(tensor) for tensor in tensors_of(graph)] == [3, 2]
    assert list(tensors_of([1, "text", None, torch.Tensor])) == []


def test_tensors_are_changed_and_containers_kept() -> None:
    before = nested()
    after = map_tensors(before, lambda tensor: tensor * 10)
    assert type(after) is OrderedDict
    assert isinstance(after["pair"], Pair)
    assert type(after["pair"].right) is list
    assert type(after["rest"]) is tuple
    assert [tensor.item() for tensor in tensors_of(after)] == [10.0, 20.0, 30.0, 40.0]
    assert [tensor.item() for tensor in tensors_of(before)] == [1.0, 2.0, 3.0, 4.0]
    assert (after["name"], after["none"], after["count"]) == ("n", None, 3)


def test_tensors_and_objects_move_to_the_device() -> None:
    packed = pack_sequence([torch.ones(2)])
    moved = to_device([nested(), packed], META)
    assert {tensor.device.type for tensor in tensors_of(moved[0])} == {"meta"}
    assert isinstance(moved[1], PackedSequence)
    assert moved[1].data.device.type == "meta"
    batch = nested()
    assert to_device(batch, CPU) is batch


def test_a_value_is_described_by_its_form() -> None:
    assert form_of(torch.zeros(3, 2)) == "a tensor of shape (3, 2)"
    assert form_of([]) == "a list"


def test_micro_batches_are_counted_on_the_device_and_fetched_uncounted() -> None:
    meter = Counting()

    def fetched():
        for size in (2, 3):
            assert not meter.is_counting
            yield torch.ones(size), size

    assert [(len(batch), size) for batch, size in feed(fetched(), CPU, meter, twice=False)] == [
        (2, 2),
        (3, 3),
    ]
    assert [len(tensor) for tensor in meter.counted] == [2, 3]


def test_a_second_pass_gets_copies_of_the_same_micro_batches() -> None:
    meter = Counting()
    fetched = [(torch.ones(2), 2), (torch.zeros(1), 1)]
    batches = feed(iter(fetched), CPU, meter, twice=True)
    for _ in range(2):
        for (batch, size), (original, original_size) in zip(batches, fetched, strict=True):
            assert size == original_size
            assert torch.equal(batch, original)
            assert batch.data_ptr() != original.data_ptr()
    assert len(meter.counted) == 4


def test_samples_are_fetched_once_for_two_passes() -> None:
    fetched = []

    def fetch():
        for number in (1, 2):
            fetched.append(number)
            yield number, 1

    batches = Twice(fetch(), lambda batch: batch * 10)
    assert [batch for batch, _ in batches] == [batch for batch, _ in batches] == [10, 20]
    assert fetched == [1, 2]
