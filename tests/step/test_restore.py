"""What a batch writes to buffers and frozen parameters is restored, or it is told that it was written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from autobatch.step.restore import SMALL_BUFFER, BufferSnapshot


class Buffers(nn.Module):
    """A small and a large buffer, one that is None, and a frozen parameter of a teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("small", torch.zeros(3))
        self.register_buffer("large", torch.zeros(SMALL_BUFFER + 1))
        self.register_buffer("missing", None)
        self.teacher = nn.Parameter(torch.zeros(3), requires_grad=False)


def write_small(model: Buffers) -> None:
    model.small.add_(1)
    model.small = torch.ones(3)
    model.missing = torch.ones(1)


def replace_teacher(model: Buffers) -> None:
    for _ in range(2):  # the second write may put the data back into the first memory
        model.teacher.data = model.teacher.data + 1


@pytest.mark.parametrize("copy_all", [False, True])
@pytest.mark.parametrize(
    "write",
    [write_small, lambda model: model.large.add_(1), lambda model: model.teacher.add_(1), replace_teacher],
)
def test_what_a_batch_writes_is_restored_or_told(write: Callable[[Buffers], None], copy_all: bool) -> None:
    model = Buffers()
    snapshot, small = BufferSnapshot(model, copy_all=copy_all), model.small
    for _ in range(2):
        snapshot.take()
        write(model)
        is_restored = copy_all or write is write_small
        assert snapshot.restore() == is_restored
        if is_restored:
            assert model.small is small
            assert model.missing is None
            assert not any(tensor.any() for tensor in (model.small, model.large, model.teacher))
    snapshot.take()
    write(model)
    snapshot.commit()
    assert snapshot.restore(), "nothing is left to restore"


def test_a_frozen_parameter_without_memory_of_its_own_is_watched_too() -> None:
    # As the shard of a rank, it wraps tensors, and has no pointer to data.
    model = nn.Module()
    model.teacher = nn.Parameter(TwoTensor(torch.zeros(3), torch.zeros(3)), requires_grad=False)
    snapshot = BufferSnapshot(model)
    snapshot.take()
    assert snapshot.restore()
    snapshot.take()
    model.teacher.add_(1)
    assert not snapshot.restore()
