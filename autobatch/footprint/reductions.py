"""The scratch memory of CUDA's reductions: sums, means, norms and the like.

If each output of a reduction has many inputs and there are few outputs, blocks of threads share an output.
They meet in a staging buffer, and count themselves with semaphores. Both are taken from the caching
allocator and freed when the operator returns. A sum over the rows of a wide matrix, as in the gradient of a
bias, takes more scratch than the matrix has bytes, and takes it from some number of rows on, in steps.

The rule is that of ``setReduceConfig`` in ATen/native/cuda/Reduce.cuh (the header in the wheels of torch
2.11, 2.13 and 2.15, in which it is the same), over the dimensions as ``TensorIterator`` orders and joins them
(``reorder_dimensions`` and ``coalesce_dimensions`` in ATen/TensorIterator.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple, Self

from autobatch.device.profiles import Processors

_WARP = 32
_MOST_THREADS = 512
_FEWEST_VALUES = 16
"""``min_values_per_thread``."""
_MOST_VALUES = 256
"""``max_values_per_thread``."""
_MOST_INDEX = 2**31 - 1
"""Elements and bytes that 32-bit indices reach. A larger reduction is cut in halves, one after the other."""
_SEMAPHORE_BYTES = 4


class Dimension(NamedTuple):
    """A dimension of a reduction; strides are in bytes."""

    size: int
    input_stride: int
    output_stride: int
    """0 if the dimension is reduced."""


class Reduction(NamedTuple):
    """A call of ``gpu_reduce_kernel``."""

    item_bytes: int
    """Of an input."""
    sum_bytes: int
    """Of an accumulator: ``arg_t``."""
    vector: int
    """Inputs that a thread reads at a time, ``input_vec_size``."""
    offset: int
    """Elements between the start of the input's block and its first element."""
    dimensions: tuple[Dimension, ...]
    """Of the tensors, the slowest first."""

    def numbers(self) -> tuple[int, ...]:
        """Return everything in one tuple."""
        return (*self[:4], *(number for dimension in self.dimensions for number in dimension))

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Self:
        """Return the reduction that has these `numbers`."""
        rest = iter(numbers[4:])
        item_bytes, sum_bytes, vector, offset = numbers[:4]
        dimensions = tuple(Dimension(*each) for each in zip(rest, rest, rest, strict=True))
        return cls(item_bytes, sum_bytes, vector, offset, dimensions)


def scratch_bytes(reduction: Reduction, processors: Processors) -> tuple[int, int]:
    """Return the bytes of the staging buffer and of the semaphores; 0 if the reduction takes none."""
    dimensions = _joined(_ordered(list(reduction.dimensions[::-1])))
    if not prod(one.size for one in dimensions):
        return 0, 0
    found = [_scratch(part, reduction, processors) for part in _indexable(dimensions)]
    return max(found)


def _scratch(dimensions: list[Dimension], kind: Reduction, processors: Processors) -> tuple[int, int]:
    """Return the scratch of a reduction over ordered dimensions, the fastest first."""
    reduced = sum(one.output_stride == 0 for one in dimensions)
    outputs = prod(one.size for one in dimensions if one.output_stride)
    inputs = prod(one.size for one in dimensions) // outputs
    is_fastest = reduced == len(dimensions) or (dimensions[0].input_stride < dimensions[reduced].input_stride)
    stride = dimensions[0 if is_fastest else reduced].input_stride if dimensions else kind.item_bytes
    width, height = (inputs, outputs) if is_fastest else (outputs, inputs)
    output_vector = 1
    if stride == kind.item_bytes:
        if is_fastest and width >= 128 and reduced == 1:
            width //= kind.vector
        elif not is_fastest:
            output_vector = _output_vector(dimensions, reduced, kind)
            width //= output_vector
    block_width, block_height = _block(width, height, _MOST_THREADS // output_vector)
    step_input, step_output = (block_width, 1) if is_fastest else (1, block_width)
    if _up(inputs, step_input) < min(block_height * 16, _MOST_VALUES):
        return 0, 0
    step_input *= block_height
    values = _up(inputs, step_input)
    grid = _up(outputs // output_vector, step_output)
    target = processors.multiprocessors * (processors.threads // (block_width * block_height))
    if values < _MOST_VALUES or grid > target:
        return 0, 0
    blocks = max(
        min(_up(target, grid), _up(values, _FEWEST_VALUES)),
        _up(values, _MOST_VALUES),
    )
    if blocks < 2:
        return 0, 0
    staging = kind.sum_bytes * outputs * blocks
    return staging if is_fastest else staging * block_width * output_vector, _SEMAPHORE_BYTES * grid


def _block(width: int, height: int, most: int) -> tuple[int, int]:
    """Return the width and the height of a block of threads (``set_block_dimension``)."""
    wide, high = (_power_of_two(size) if size < most else most for size in (width, height))
    block_height = min(high, most // min(wide, _WARP))
    return min(wide, most // block_height), block_height


def _output_vector(dimensions: Sequence[Dimension], reduced: int, kind: Reduction) -> int:
    """Return the number of outputs per thread (``get_output_vec_size``)."""
    others = [one.input_stride // kind.item_bytes for at, one in enumerate(dimensions) if at != reduced]
    multiples = (kind.offset, dimensions[reduced].size, *others)
    return next(vector for vector in (4, 2, 1) if all(each % vector == 0 for each in multiples))


def _ordered(dimensions: list[Dimension]) -> list[Dimension]:
    """Sort dimensions, given the fastest first: reduced ones first, then by stride, by an insertion sort.

    The comparison may have no answer, and is not transitive then, so the sort must be the same.
    """
    found = list(dimensions)
    for at in range(1, len(found)):
        later = at
        for earlier in range(at - 1, -1, -1):
            order = _compared(found[earlier], found[later])
            if order > 0:
                found[earlier], found[later] = found[later], found[earlier]
                later = earlier
            elif order < 0:
                break
    return found


def _compared(one: Dimension, other: Dimension) -> int:
    """Return 1 if a dimension should come after another one, -1 if before it, and 0 if both are right."""
    if (one.output_stride == 0) != (other.output_stride == 0):
        return 1 if other.output_stride == 0 else -1
    for stride, others in ((one.output_stride, other.output_stride), (one.input_stride, other.input_stride)):
        if 0 in (stride, others):
            continue
        if stride != others:
            return -1 if stride < others else 1
        if one.size > other.size:
            return 1
    return 0


def _joined(dimensions: Sequence[Dimension]) -> list[Dimension]:
    """Join dimensions that are one in memory."""
    found: list[Dimension] = []
    for one in dimensions:
        last = found[-1] if found else None
        if last is None:
            found.append(one)
        elif last.size == 1:
            found[-1] = one
        elif one.size == 1 or (
            last.size * last.input_stride == one.input_stride
            and last.size * last.output_stride == one.output_stride
        ):
            found[-1] = last._replace(size=last.size * one.size)
        else:
            found.append(one)
    return found


def _indexable(dimensions: list[Dimension]) -> list[list[Dimension]]:
    """Cut dimensions in halves until 32-bit indices suffice (``with_32bit_indexing``)."""
    ends = [
        1 + sum((one.size - 1) * stride for one, stride in zip(dimensions, each, strict=True))
        for each in zip(*((one.input_stride, one.output_stride) for one in dimensions), strict=True)
    ]
    if prod(one.size for one in dimensions) <= _MOST_INDEX and max(ends, default=0) <= _MOST_INDEX:
        return [dimensions]
    extents = [(one.size - 1) * max(one.input_stride, one.output_stride) for one in dimensions]
    at = max(reversed(range(len(dimensions))), key=lambda index: extents[index])
    half = dimensions[at].size // 2
    return [
        part
        for size in (half, dimensions[at].size - half)
        for part in _indexable(
            _joined([*dimensions[:at], dimensions[at]._replace(size=size), *dimensions[at + 1 :]])
        )
    ]


def _power_of_two(number: int) -> int:
    """Return the largest power of two up to a number, at least 1."""
    return 1 << max(0, number.bit_length() - 1)


def _up(number: int, divisor: int) -> int:
    return -(-number // divisor)
