"""How much an operator is about to make, told before it runs.

Most operators make about as much as they are given, so a guess from their arguments says cheaply that there
is room. Only where the guess finds none does the operator run on the meta device, which tells exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import zip_longest
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten


_PRODUCTS: dict[Any, Callable[..., int]] = {
    aten.mm.default: lambda a, b, *_: a.shape[0] * b.shape[1],
    aten.bmm.default: lambda a, b, *_: a.shape[0] * a.shape[1] * b.shape[2],
    aten.addmm.default: lambda _, a, b, *__: a.shape[0] * b.shape[1],
    aten.baddbmm.default: lambda _, a, b, *__: a.shape[0] * a.shape[1] * b.shape[2],
    aten.embedding.default: lambda weight, ids, *_: ids.numel() * weight.shape[-1],
    aten.repeat.default: lambda x, sizes, *_: x.numel() * prod(sizes),
    aten.convolution.default: lambda x, weight, *_: x.numel() * weight.shape[0],
}
"""Elements, or more, that operators make out of much smaller arguments."""


_WIDEST_BYTES = 8
"""The widest usual element: what is guessed where the dtype of the output is not looked at."""


def output_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, threshold: int) -> int:
    """Bytes of the new storages that an operator will make; 0 where they are surely within ``threshold``.

    Also 0 where it cannot be told: the operator has no meta kernel, a tensor is sparse, or its outputs depend
    on the data.
    """
    if _guess(func, args, threshold) <= threshold:
        return 0
    try:
        with torch.no_grad():
            out = func(*_on_meta(args), **_on_meta(kwargs))
        return sum({s._cdata: s.nbytes() for s in (t.untyped_storage() for t in _tensors(out))}.values())
    except Exception:
        # Whatever is wrong shows with the real arguments as well, or only the meta kernel is missing.
        return 0


def _guess(func: Any, args: tuple[Any, ...], threshold: int) -> int:
    """An upper bound for most operators, from their arguments alone, in bytes; coarse where that will do."""
    product = _PRODUCTS.get(func)
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
    """Its size; of a sparse one, which has no ``nbytes``, what it would be dense."""
    return tensor.numel() * tensor.element_size()


def _on_meta(values: Any) -> Any:
    def fake_copy(tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided:
            raise NotImplementedError("how much of a sparse tensor is there depends on the data")
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    moved = tree_map_only(Tensor, fake_copy, values)
    return tree_map_only(torch.device, lambda _: torch.device("meta"), moved)


def _tensors(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, list | tuple):
        for each in out:
            yield from _tensors(each)


PAGE = 4096


PARTS = 8
"""Parts that are rounded up, each by less than a page."""


SAMPLES = 64
"""Samples of the layers that are asked: so many of any part are whole pages, or nearly."""


class Workspaces:
    """Sizes of oneDNN's workspaces; each kind of layer is asked once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[int, int]] = {}

    def bytes_of(self, args: tuple[Any, ...]) -> int:
        """The workspace of a call of ``aten::mkldnn_rnn_layer``, in bytes: at most `PARTS` pages too many.

        Args:
            args: of the call; its tensors may be fakes. The input is (time steps, samples, features).
        """
        steps, samples, features = args[0].shape
        hidden, is_trained = args[10], args[15]
        if not is_trained:
            return 0
        key = (features, hidden, args[0].dtype, args[12])
        if key not in self._known:
            one, two = (_asked(args, at, features, hidden) for at in (1, 2))
            self._known[key] = (two - one, 2 * one - two)
        a_step, fixed = self._known[key]
        whole = int(samples * (steps * a_step + fixed))
        return -(-whole // SAMPLES) + PARTS * PAGE


def _asked(args: tuple[Any, ...], steps: int, features: int, hidden: int) -> int:
    """The workspace of a layer of so many time steps, really run, in bytes."""
    # Inside a dispatch of fakes, these tensors are to be real ones.
    with torch._C._DisableTorchDispatch(), torch.enable_grad():

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=args[0].dtype, device="cpu")

        rows = args[1].shape[0]
        state = zeros(SAMPLES, hidden)
        out = torch.ops.aten.mkldnn_rnn_layer.default(
            zeros(steps, SAMPLES, features),
            zeros(rows, features),
            zeros(rows, hidden),
            zeros(rows),
            zeros(rows),
            state,
            state,
            *args[7:],
        )
    return int(out[3].numel() * out[3].element_size())
