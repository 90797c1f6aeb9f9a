"""Losses over all samples of a window, accumulated exactly, by gradient caching.

    represent each micro-batch ──► join ──► loss, backward ──► gradient of every row
    represent each micro-batch again, as before ──► backward from its rows with their gradients

By the chain rule that is the gradient of one pass over the whole window; the price is a second forward pass
(Gao et al. 2021, arXiv:2101.06983). What a forward pass depends on comes back for the second one: random
states for each micro-batch, buffers for the window. The first pass records its graph too, only to drop it:
operators and compilers choose by whether one is asked for, the second pass needs that memory anyway, and so
both compute the same, bit for bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from autobatch.core.errors import InputError
from autobatch.workload.contract import Collated, WholeBatchLoss, kind_of
from autobatch.workload.nested import form_of, map_tensors, tensors_of
from autobatch.workload.rng import RandomState, capture_random_state, restore_random_state
from autobatch.workload.user_code import user_code


def batch_samples(window: int | None, micro_batch: int, count: int) -> int:
    """Samples that an attempt's micro-batches stand for: a whole window, where its size is known."""
    return micro_batch * count if window is None else max(window, micro_batch)


class Rows:
    """The representations of a window, joined as its micro-batches come; then their gradients.

    Args:
        samples: rows in all.
    """

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self.collated: Any = None
        """In the form that ``represent`` gives them."""
        self._trained: list[bool] = []
        self._gradients: list[Tensor | None] = []

    def put(self, first: int, found: Any, size: int) -> None:
        """Take over what ``represent`` gave for the ``size`` samples from ``first`` on.

        Raises:
            InputError: it does not hold a row a sample, or is not like that of the micro-batch before.
        """
        parts = _parts(found, size)
        if self.collated is None:
            self.collated = map_tensors(found, lambda part: part.new_empty((self._samples, *part.shape[1:])))
            self._trained = [False] * len(parts)
        wholes = list(tensors_of(self.collated))
        if [(w.shape[1:], w.dtype) for w in wholes] != [(part.shape[1:], part.dtype) for part in parts]:
            raise InputError(
                "WholeBatchLoss(represent=…) gave rows of another form for one micro-batch than for another: "
                f"{_forms(wholes)}, then {_forms(parts)}; rows are joined, so pad them to one form"
            )
        self._trained = [was or one.requires_grad for was, one in zip(self._trained, parts, strict=True)]
        start = self._start(first, size)
        for whole, part in zip(wholes, parts, strict=True):
            whole[start : start + size].copy_(part.detach())

    def fill(self, known: int) -> None:
        """Repeat the first rows where an attempt runs fewer micro-batches than a window has."""
        while 0 < known < self._samples:
            more = min(known, self._samples - known)
            for whole in tensors_of(self.collated):
                whole[known : known + more].copy_(whole[:more])
            known += more

    def leaves(self) -> Any:
        """The joined rows; gradients are asked of those that came out of what is trained."""
        for whole, is_trained in zip(tensors_of(self.collated), self._trained, strict=True):
            whole.requires_grad_(is_trained)
        return self.collated

    def keep_gradients(self) -> None:
        """Let go of the rows; their gradients stay."""
        self._gradients = [whole.grad for whole in tensors_of(self.collated)]
        self.collated = None

    def go_backward(self, first: int, found: Any, size: int) -> None:
        """Go backward from the rows of a micro-batch, which were found again."""
        start = self._start(first, size)
        parts, gradients = [], []
        for part, gradient in zip(_parts(found, size), self._gradients, strict=True):
            if part.requires_grad and gradient is not None:
                parts.append(part)
                gradients.append(gradient[start : start + size])
        if parts:
            torch.autograd.backward(parts, gradients)

    def _start(self, first: int, size: int) -> int:
        """Where rows stand; the two micro-batches of an attempt may be more than the window."""
        return min(first, self._samples - size)


def backward_whole_batch(
    loss: WholeBatchLoss,
    model: nn.Module,
    batches: Iterable[tuple[Collated, int]],
    samples: int,
    *,
    context: Callable[[], AbstractContextManager[object]],
    scaled: Callable[[Tensor], Tensor],
    rewind: Callable[[], None],
    mark: Callable[[str], None],
) -> Tensor:
    """Add the gradient of a window's loss to what is trained.

    Args:
        loss: in its two parts.
        model: what trains.
        batches: each micro-batch with its number of samples; can be gone through twice (`batches.Twice`).
        samples: of the whole window. A micro-batch of as many needs one pass; of fewer in all, as an attempt
            runs them, the rows are repeated, so that the loss sees as many.
        context: what forward passes run in: autocast.
        scaled: the loss as to go backward from.
        rewind: puts the buffers back to the start of the window.
        mark: told what comes next.

    Returns:
        The loss, before any scale.

    Raises:
        InputError: a part of the loss returns what it must not.
    """
    rows, states, first = Rows(samples), deque[RandomState](), 0
    for batch, size in batches:
        states.append(capture_random_state())
        mark("forward")
        if size >= samples:
            with context(), user_code("loss"):
                value = _checked(loss(model, batch))
            mark("backward")
            return _backward(value, scaled)
        with context(), user_code("loss"):
            rows.put(first, loss.represent(model, batch), size)
        first += size
        # The next batch is placed while this frame lives: let go of this one first.
        del batch
    rows.fill(first)
    mark("loss")
    with context(), user_code("loss"):
        value = _checked(loss.loss(model, rows.leaves()))
    value = _backward(value, scaled)
    rows.keep_gradients()
    after = capture_random_state()
    rewind()
    first = 0
    for batch, size in batches:
        restore_random_state(states.popleft())
        mark("forward")
        with context(), user_code("loss"):
            found = loss.represent(model, batch)
        mark("backward")
        with user_code("the backward pass of its loss"):
            rows.go_backward(first, found, size)
        first += size
        del batch, found
    assert not states, "the micro-batches cannot be gone through twice"
    restore_random_state(after)
    return value


def _backward(value: Tensor, scaled: Callable[[Tensor], Tensor]) -> Tensor:
    with user_code("the backward pass of its loss"):
        # A constant is what a loss may return where nothing counts.
        if value.requires_grad:
            scaled(value).backward()  # type: ignore[no-untyped-call]
    return value.detach()


def _checked(value: Any) -> Tensor:
    if isinstance(value, Tensor) and value.dim() == 0:
        return value
    raise InputError(f"WholeBatchLoss(loss=…) must return a 0-d tensor, found {form_of(value)}")


def _parts(found: Any, size: int) -> list[Tensor]:
    """The tensors that ``represent`` gave, each with a row a sample."""
    parts = list(tensors_of(found)) if isinstance(found, Tensor | tuple | list | dict) else []
    if not parts or any(part.dim() == 0 or len(part) != size for part in parts):
        raise InputError(
            "WholeBatchLoss(represent=…) must return a tensor, or a tuple, list or dict of tensors, with a "
            f"row for each sample; of {size} samples it made {_forms(parts) if parts else kind_of(found)}"
        )
    return parts


def _forms(tensors: Iterable[Tensor]) -> str:
    return ", ".join(f"{tuple(one.shape)} of {str(one.dtype).removeprefix('torch.')}" for one in tensors)
