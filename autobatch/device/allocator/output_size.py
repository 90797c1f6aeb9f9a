"""The size of an operator's outputs, known before it runs.

Most operators produce about as much as they get, so a cheap guess from the arguments usually shows that there
is room. Only if it does not, the operator runs on the meta device, which gives the exact size.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
_PRODUCTS: dict[int, Callable[..., int]] = {
    id(aten.mm.default): lambda a, b, *_: a.shape[0] * b.shape[1],
    id(aten.bmm.default): lambda a, b, *_: a.shape[0] * a.shape[1] * b.shape[2],
    id(aten.addmm.default): lambda _, a, b, *__: a.shape[0] * b.shape[1],
    id(aten.baddbmm.default): lambda _, a, b, *__: a.shape[0] * a.shape[1] * b.shape[2],
    id(aten.embedding.default): lambda weight, ids, *_: ids.numel() * weight.shape[-1],
    id(aten.repeat.default): lambda x, sizes, *_: x.numel() * prod(sizes),
    id(aten.convolution.default): lambda x, weight, *_: x.numel() * weight.shape[0],
}
"""Upper bounds for the elements that operators produce from much smaller arguments. Operators stand by their
identity, because their own hash takes longer than the rest of a look-up."""
_WIDEST_BYTES = 8
"""The widest usual element: the guess if the dtype of the output is not considered."""


def output_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, threshold: int) -> int:
    """Return the bytes of the new storages that an operator will make; 0 if they are within ``threshold``.

    The result is also 0 if the size is unknown: the operator has no meta kernel, a tensor is sparse, or the
    outputs depend on the data.
    """
    if _guess(func, args, threshold) <= threshold:
        return 0
    try:
        copies = _on_meta(args), _on_meta(kwargs)
        with torch.no_grad():
            out = func(*copies[0], **copies[1])
        # Some operators return a view of an argument which their schema does not declare (_unsafe_view).
        given = _storages(copies)
        return sum(size for storage, size in _storages(out).items() if storage not in given)
    except Exception:
        # The real arguments raise the same error, or only the meta kernel is missing.
        return 0


def _guess(func: Any, args: tuple[Any, ...], threshold: int) -> int:
    """Return an upper bound in bytes for most operators, from the arguments; coarse if that suffices."""
    product = _PRODUCTS.get(id(func))
    if product is not None:
        return product(*args) * _WIDEST_BYTES
    given: list[Tensor] = []
    coarse = made = 0
    for arg in args:
        if isinstance(arg, Tensor):
            given.append(arg)
            coarse = (coarse or _WIDEST_BYTES) * (arg.numel() or 1)
        elif isinstance(arg, list | tuple) and arg:
            if isinstance(arg[0], Tensor):
                made = max(made, sum(_nbytes(each) for each in arg if isinstance(each, Tensor)))
            elif isinstance(arg[0], int):
                made = max(made, prod(arg) * _WIDEST_BYTES)
    if len(given) == 1:
        coarse = 2 * _nbytes(given[0])
    elif coarse > threshold:
        rows = zip_longest(*(reversed(tensor.shape) for tensor in given), fillvalue=1)
        coarse = max(
            prod(map(max, rows)) * max(tensor.element_size() for tensor in given),
            sum(map(_nbytes, given)),
        )
    return max(coarse, made)


def _nbytes(tensor: Tensor) -> int:
    """Return the size of a tensor; of a sparse one, which has no ``nbytes``, its dense size."""
    return tensor.numel() * tensor.element_size()


def _on_meta(values: Any) -> Any:
    def fake_copy(tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided:
            raise NotImplementedError("the size of a sparse tensor depends on the data")
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    moved = tree_map_only(Tensor, fake_copy, values)
    return tree_map_only(torch.device, lambda _: torch.device("meta"), moved)


def _storages(tensors: Any) -> dict[int, int]:
    """Return the bytes of the storages of a tree of tensors."""
    storages = [one.untyped_storage() for one in tree_leaves(tensors) if isinstance(one, Tensor)]
    return {storage._cdata: storage.nbytes() for storage in storages}
