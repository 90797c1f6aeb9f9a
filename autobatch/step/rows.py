"""The representations of the samples of a batch, which a loss over the whole batch compares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from autobatch.core.errors import InputError
from autobatch.workload.contract import kind_of
from autobatch.workload.nested import map_tensors, tensors_of


class Rows:
    """The representations of a batch, one row per sample, filled by micro-batch; later their gradients."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self.collated: Any = None
        """All rows, in the form that ``represent`` returns; None before the first micro-batch."""
        self._trained: list[bool] = []
        self._gradients: list[Tensor | None] = []

    def put(self, places: Sequence[int], represented: Any) -> None:
        """Copy the rows that ``represent`` returned for the samples at these places of the batch.

        Raises:
            InputError: there is not one row per sample, or the form differs from the micro-batch before.
        """
        parts = _parts(represented, len(places))
        if self.collated is None:
            self.collated = map_tensors(
                represented, lambda part: part.new_empty((self._samples, *part.shape[1:]))
            )
            self._trained = [False for _ in parts]
        wholes = list(tensors_of(self.collated))
        if [(w.shape[1:], w.dtype) for w in wholes] != [(part.shape[1:], part.dtype) for part in parts]:
            raise InputError(
                "WholeBatchLoss(represent=…) must return rows of one form for all micro-batches, found "
                f"{_forms(wholes)}, then {_forms(parts)}: pad them to one form"
            )
        self._trained = [was or part.requires_grad for was, part in zip(self._trained, parts, strict=True)]
        for whole, part in zip(wholes, parts, strict=True):
            whole[_index(places, whole)] = part.detach()

    def repeat(self, known: int) -> None:
        """Repeat the ``known`` rows to the end, for an attempt with fewer micro-batches than its batch."""
        while 0 < known < self._samples:
            more = min(known, self._samples - known)
            for whole in tensors_of(self.collated):
                whole[known : known + more].copy_(whole[:more])
            known += more

    def leaves(self) -> Any:
        """Return all rows as leaves that require a gradient if they depend on trained parameters."""
        for whole, is_trained in zip(tensors_of(self.collated), self._trained, strict=True):
            whole.requires_grad_(is_trained)
        return self.collated

    def keep_gradients(self) -> None:
        """Keep the gradients of the rows, and free the rows."""
        self._gradients = [whole.grad for whole in tensors_of(self.collated)]
        self.collated = None

    def run_backward(self, places: Sequence[int], represented: Any) -> None:
        """Run the backward pass of a micro-batch from its recomputed rows."""
        pairs = [
            (part, gradient[_index(places, gradient)])
            for part, gradient in zip(_parts(represented, len(places)), self._gradients, strict=True)
            if part.requires_grad and gradient is not None
        ]
        if pairs:
            torch.autograd.backward([part for part, _ in pairs], [gradient for _, gradient in pairs])


def _index(places: Sequence[int], like: Tensor) -> slice | Tensor:
    """Return what selects the rows at some places: a slice if they are contiguous, which copies nothing."""
    if isinstance(places, range):
        return slice(places.start, places.stop)
    return torch.tensor(places, device=like.device)


def _parts(represented: Any, size: int) -> list[Tensor]:
    """Return the tensors that ``represent`` returned, after a check that each has one row per sample."""
    parts = list(tensors_of(represented)) if isinstance(represented, Tensor | tuple | list | dict) else []
    if not parts or any(part.dim() == 0 or len(part) != size for part in parts):
        raise InputError(
            "WholeBatchLoss(represent=…) must return a tensor, or a tuple, list or dict of tensors, with one "
            f"row per sample: for {size} samples, found {_forms(parts) if parts else kind_of(represented)}"
        )
    return parts


def _forms(tensors: Iterable[Tensor]) -> str:
    return ", ".join(
        f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors
    )
