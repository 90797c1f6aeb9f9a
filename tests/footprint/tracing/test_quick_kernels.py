"""Quick operators on fakes, against torch's mode of fakes."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from autobatch.footprint.tracing.known_values import KnownValues
from autobatch.footprint.tracing.quick_kernels import _PLAIN, QuickKernels
from autobatch.footprint.tracing.trace_step import new_mode

aten = torch.ops.aten

VIEWS = [
    (aten.view.default, ([6, 4],), {}),
    (aten.as_strided.default, ([2, 3], [1, 2], 5), {}),
    (aten.detach.default, (), {}),
    (aten.transpose.int, (0, 2), {}),
    (aten.slice.Tensor, (1, 1, 3), {}),
    (aten.select.int, (1, 2), {}),
    (aten.unsqueeze.default, (0,), {}),
    (aten.expand.default, ([5, 2, 3, 4],), {}),
    (aten.permute.default, ([2, 0, 1],), {}),
    (aten.split.Tensor, (2, 1), {}),
    (aten.split_with_sizes.default, ([1, 3],), {"dim": 2}),
]


@pytest.mark.parametrize(("func", "args", "kwargs"), VIEWS, ids=[str(func) for func, _, _ in VIEWS])
def test_a_view_past_the_mode_of_fakes_is_the_one_of_the_mode(func, args, kwargs) -> None:
    with new_mode():
        x = torch.empty(2, 3, 4, dtype=torch.bfloat16)
        expected = func(x, *args, **kwargs)
        found = QuickKernels().of(func, (x,))(x, *args, **kwargs)
    for one, other in zip(
        *(made if isinstance(made, list | tuple) else [made] for made in (found, expected)), strict=True
    ):
        assert type(one) is type(other)
        assert one.untyped_storage()._cdata == x.untyped_storage()._cdata
        for what in ("shape", "dtype", "device", "layout"):
            assert getattr(one, what) == getattr(other, what)
        assert (one.stride(), one.storage_offset()) == (other.stride(), other.storage_offset())


def test_a_view_that_is_impossible_is_refused_as_by_the_mode() -> None:
    with new_mode():
        x = torch.empty(2, 3).t()
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            QuickKernels().of(aten.view.default, (x,))(x, [6])
    assert QuickKernels().of(aten.topk.default, (x,)) is None


def plain_arguments() -> list[tuple[object, tuple[object, ...]]]:
    """Return operators with arguments of several layouts and types, one call of each operator at least."""
    x, y = torch.empty(4, 6), torch.empty(6, 4).t()
    row, whole = torch.empty(6, dtype=torch.bfloat16), torch.empty(4, 6, dtype=torch.int32)
    sparse_rows = torch.empty(8, 6)[::2]
    pairs = [(x, x), (x, y), (y, y), (x, row), (whole, x), (whole, whole), (sparse_rows, x), (x, 2), (x, 2.0)]
    calls: list[tuple[object, tuple[object, ...]]] = [
        (func, pair)
        for func in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
        for pair in [*pairs, (whole, 2), (whole, 2.0), (whole, True), (row, 2.0)]
    ]
    calls += [
        (func, (one,))
        for func in (aten.neg.default, aten.sqrt.default, aten.rsqrt.default, aten.sigmoid.default)
        for one in (x, y, row, whole, sparse_rows)
    ]
    calls += [(func, (one,)) for func in (aten.tanh.default, aten.relu.default) for one in (x, y, row)]
    calls += [(func, (x, y)) for func in (aten.sigmoid_backward.default, aten.tanh_backward.default)]
    calls += [
        (aten.threshold_backward.default, (x, y, 0)),
        (aten.mul.Scalar, (whole, 2)),
        (aten.mul.Scalar, (whole, 2.0)),
        (aten.pow.Tensor_Scalar, (whole, 2)),
        (aten.pow.Tensor_Scalar, (whole, 0.5)),
        (aten.mm.default, (x, x.t())),
        (aten.bmm.default, (torch.empty(2, 3, 4), torch.empty(2, 5, 4).transpose(1, 2))),
        (aten.addmm.default, (torch.empty(4), x, x.t())),
        (aten.sum.dim_IntList, (x, [1])),
        (aten.sum.dim_IntList, (x, [1], True)),
        (aten.sum.dim_IntList, (whole, [0])),
        (aten.mean.dim, (y, [-1], True)),
        (aten.cat.default, ([x, y],)),
        (aten.cat.default, ([x, y], 1)),
        (aten._softmax.default, (y, 1, False)),
        (aten._softmax_backward_data.default, (x, y, 1, torch.float32)),
    ]
    return calls


def form_of(made: torch.Tensor) -> tuple[object, ...]:
    size = made.untyped_storage().nbytes()
    return type(made), made.shape, made.stride(), made.storage_offset(), made.dtype, made.device, size


def test_a_remembered_result_is_a_new_one_of_the_form_that_the_mode_gives() -> None:
    quick, asked = QuickKernels(), set()
    with new_mode():
        for func, args in plain_arguments() * 2:
            asked.add(func)
            expected = func(*args)
            found = quick.of(func, args)(*args)
            assert form_of(found) == form_of(expected), (func, args)
            storage = found.untyped_storage()._cdata
            assert storage not in {one.untyped_storage()._cdata for one in args if torch.is_tensor(one)}
            assert storage != quick.of(func, args)(*args).untyped_storage()._cdata
    assert asked == _PLAIN


def test_a_remembered_result_is_on_the_device_of_its_arguments() -> None:
    quick = QuickKernels()
    with new_mode() as mode:
        for device in ("cpu", "cuda", "cpu"):
            one = FakeTensor(mode, torch.empty((), device="meta"), torch.device(device))
            assert quick.of(aten.add.Tensor, (one, one))(one, one).device.type == device


def test_values_and_real_tensors_are_left_to_the_mode() -> None:
    quick, real = QuickKernels(), torch.arange(3)
    mode = new_mode()
    known = KnownValues(mode)
    with mode, known.kept():
        value = known.fake(real)
        for one in (value, real):
            kernel = quick.of(aten.mul.Tensor, (one, one))
            kernel(one, one)
            assert kernel._forms == {}
