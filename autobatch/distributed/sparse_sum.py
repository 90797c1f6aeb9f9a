"""The sum of a sparse gradient over the ranks, which carries the entries of each and never a dense tensor.

Every rank writes its entries into a place of its own in tensors that are zero elsewhere. Their sum has the
entries of all ranks, one after the other. No number is added to another but zero, so that all ranks get the
same gradient, bit for bit, on any backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def as_sparse(gradient: Tensor | None, like: Tensor) -> Tensor:
    """Return a gradient with one entry per row: as it is if it is sparse; without entries if it is None.

    Args:
        gradient: of a rank.
        like: the parameter.
    """
    if gradient is None:
        indices = torch.empty((1, 0), dtype=torch.int64, device=like.device)
        values = torch.empty((0, *like.shape[1:]), dtype=like.dtype, device=like.device)
        return _of_entries(indices, values, like.shape)
    return gradient.coalesce() if gradient.is_sparse else gradient.to_sparse(1)


def sum_sparse(own: Tensor, counts: Sequence[int], rank: int, reduce: Callable[[Tensor], object]) -> Tensor:
    """Return the gradient of all ranks, which is not coalesced; all ranks call it.

    Args:
        own: the gradient of this rank, coalesced.
        counts: entries of each rank.
        rank: this rank.
        reduce: sums a dense tensor over the ranks in place.
    """
    first, last = sum(counts[:rank]), sum(counts[: rank + 1])
    indices = own.indices().new_zeros((own.sparse_dim(), sum(counts)))
    values = own.values().new_zeros((sum(counts), *own.values().shape[1:]))
    indices[:, first:last] = own.indices()
    values[first:last] = own.values()
    reduce(indices)
    reduce(values)
    return _of_entries(indices, values, own.shape)


def _of_entries(indices: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    # Before torch 2.13 it warns that nothing is checked, even if an argument asks for that.
    with torch.sparse.check_sparse_tensor_invariants(enable=False):  # type: ignore[no-untyped-call]
        return torch.sparse_coo_tensor(indices, values, shape)
