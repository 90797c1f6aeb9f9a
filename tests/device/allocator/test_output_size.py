"""Predicted sizes of outputs, against those of operators that really run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autobatch.device.allocator.tracker import output_bytes

aten = torch.ops.aten


def made_bytes(func, args, kwargs) -> int:
    """Run the operator, and sum up the storages that are not its arguments'."""
    given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
    out = func(*args, **kwargs)
    several = out if isinstance(out, list | tuple) else [out]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in several}
    return sum(size for pointer, size in storages.items() if pointer not in given)


CALLS = {
    "mm": (aten.mm.default, (torch.ones(30, 2), torch.ones(2, 50)), {}),
    "add with a broadcast": (aten.add.Tensor, (torch.ones(40, 1), torch.ones(1, 30)), {}),
    "cast": (aten._to_copy.default, (torch.ones(100),), {"dtype": torch.float64}),
    "repeat": (aten.repeat.default, (torch.ones(3), [40, 50]), {}),
    "expanded clone": (aten.clone.default, (torch.ones(3, 1).expand(3, 70),), {}),
    "embedding": (aten.embedding.default, (torch.ones(5, 60), torch.zeros(7, dtype=torch.long)), {}),
    "several outputs": (aten.native_layer_norm.default, (torch.ones(9, 8), [8], None, None, 1e-5), {}),
    "cat": (aten.cat.default, ([torch.ones(20), torch.ones(30)],), {}),
    "view that no schema declares": (aten._unsafe_view.default, (torch.ones(5, 6, 7), [30, 7]), {}),
    "views that no schema declares": (aten.unsafe_split.Tensor, (torch.ones(30, 7), 5), {}),
    "zeros": (aten.new_zeros.default, (torch.ones(1), [30, 40]), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_size_is_exact_if_there_is_no_room(name):
    func, args, kwargs = CALLS[name]
    assert output_bytes(func, args, kwargs, threshold=0) == made_bytes(func, args, kwargs)


@pytest.mark.parametrize("name", CALLS)
def test_no_output_over_the_threshold_is_missed(name):
    """The guess from the arguments may be too high, never too low."""
    func, args, kwargs = CALLS[name]
    size = made_bytes(func, args, kwargs)
    for threshold in (size // 4, size - 1):
        assert output_bytes(func, args, kwargs, threshold=threshold) == size


def test_with_ample_room_nothing_runs(monkeypatch):
    monkeypatch.setattr("autobatch.device.allocator.tracker._on_meta", None)
    for func, args, kwargs in CALLS.values():
        assert output_bytes(func, args, kwargs, threshold=10**6) == 0


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.nonzero.default, (torch.ones(1000),)),  # the data decide
        (aten.add.Tensor, (torch.eye(100).to_sparse(), torch.eye(100).to_sparse())),
        (aten.mm.default, (torch.ones(30, 2), torch.ones(3, 50))),  # raises when it runs
    ],
)
def test_an_unknown_size_is_0(func, args):
    assert output_bytes(func, args, {}, threshold=0) == 0
