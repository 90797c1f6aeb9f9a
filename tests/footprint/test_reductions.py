"""The scratch of reductions, against what torch's CUDA build takes for them."""

from __future__ import annotations

import random

import pytest
import torch

from autobatch.device.allocator.trace import FREE
from autobatch.device.profiles import Processors
from autobatch.footprint.reductions import Dimension, Reduction, scratch_bytes

H100 = Processors(132, 2048)


def reduction(shape, reduced, *, item=4, total=4, vector=4, strides=None):
    """Describe a reduction of a contiguous tensor, or one with these strides in elements."""
    x = (
        torch.empty(shape, device="meta")
        if strides is None
        else torch.empty_strided(shape, strides, device="meta")
    )
    out = torch.empty([1 if dim in reduced else size for dim, size in enumerate(shape)], device="meta")
    own = [0 if dim in reduced else stride * item for dim, stride in enumerate(out.stride())]
    dimensions = zip(shape, (stride * item for stride in x.stride()), own, strict=True)
    return Reduction(item, total, vector, 0, tuple(Dimension(*each) for each in dimensions))


@pytest.mark.parametrize(
    ("shape", "reduced", "kind", "taken"),
    [
        # As torch 2.13.0+cu130 took them on an H100 of 132 multiprocessors (tests/stub_gpu).
        ((4096, 2048), (0,), {}, (67108864, 64)),
        ((10000, 2048), (0,), {}, (138412032, 64)),
        ((4096, 100), (0,), {}, (819200, 8)),
        ((20000, 100), (0,), {}, (4019200, 8)),
        ((512, 2048), (0,), {}, (0, 0)),
        ((4096, 256), (0, 1), {}, (512, 4)),
        ((4096, 256), (0,), {"total": 16, "vector": 2}, (33554432, 8)),
        ((8192, 64), (0,), {"item": 2, "total": 2}, (524288, 4)),
        ((64, 8192), (1,), {}, (0, 0)),
    ],
)
def test_scratch_is_that_of_torch(shape, reduced, kind, taken):
    assert scratch_bytes(reduction(shape, reduced, **kind), H100) == taken


def test_the_scratch_of_a_bias_grows_in_steps_with_the_rows():
    taken = [scratch_bytes(reduction((rows, 2048), (0,)), H100)[0] for rows in range(1, 20_000, 50)]
    assert taken[0] == 0
    assert len(set(taken)) < len(taken) / 3
    few = [scratch_bytes(reduction((rows, 2048), (0,)), Processors(40, 1024))[0] for rows in (4096, 20_000)]
    assert few[0] < taken[82], "a GPU with fewer processors takes less"


def test_a_reduction_that_32_bit_indices_do_not_reach_runs_in_parts():
    half = scratch_bytes(reduction((500_000, 1024), (0,)), H100)
    assert scratch_bytes(reduction((1_000_000, 1024), (0,)), H100) == half


@pytest.mark.gpu
def test_any_reduction_takes_the_scratch_that_is_predicted():
    """Random shapes, strides, types and operators."""
    from tests.support.gpu_events import history, processors_here

    draw = random.Random(3)
    sizes = (1, 2, 3, 7, 8, 16, 31, 32, 100, 128, 256, 300, 512, 1000, 1024, 2048, 3000, 4096, 10_000)
    operators = {
        "sum": (torch.sum, lambda x: max(4, x.element_size()), 4),
        "mean": (torch.mean, lambda x: max(4, x.element_size()), 4),
        "amax": (torch.amax, lambda x: x.element_size(), 4),
        "var": (torch.var, lambda x: 4 * max(4, x.element_size()), 2),
    }
    compared = with_scratch = 0
    while compared < 500:
        shape = [draw.choice(sizes) for _ in range(draw.randint(1, 4))]
        if torch.Size(shape).numel() > 3e7:
            continue
        dtype = draw.choice([torch.float32, torch.float16, torch.bfloat16, torch.float64])
        x = torch.empty(shape, dtype=dtype, device="cuda").permute(draw.sample(range(len(shape)), len(shape)))
        dims = draw.sample(range(x.dim()), draw.randint(1, x.dim()))
        function, total, vector = operators[draw.choice(list(operators))]
        if function is torch.var and all(x.shape[dim] == 1 for dim in dims):
            continue
        trace = history(lambda x=x, dims=dims, function=function: function(x, dims))
        sizes_taken = [size for _, size in trace.events if size != FREE][1:]
        own = reduction(
            tuple(x.shape), dims, item=x.element_size(), total=total(x), vector=vector, strides=x.stride()
        )
        expected = scratch_bytes(own, processors_here())
        assert sizes_taken == [size for size in expected if size], (
            function,
            dtype,
            x.shape,
            x.stride(),
            dims,
        )
        compared += 1
        with_scratch += bool(sizes_taken)
    assert with_scratch > 20
