"""The memory of a rank that has a whole model, as DDP and the package's own reduction lay it out.

DDP keeps all gradients in buckets from its construction on, and zeroes them in place. Its reducer cannot run
on fake tensors, but what it allocates is known: the buckets, of 25 MiB each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from autobatch.core.records.base import Precision
from autobatch.step.gradients import EXCHANGE_BYTES, LOW_PRECISION
from autobatch.step.train_state import TrainState
from autobatch.workload.contract import Collated


def has_buckets(model: nn.Module) -> bool:
    """Check whether GPUs would train a model through DDP, by the rule of `autobatch.distributed.choose`."""
    trained = [p for p in model.parameters() if p.requires_grad]
    is_small = sum(p.numel() * p.element_size() for p in trained) <= EXCHANGE_BYTES
    return not is_small and not any(p.dtype in LOW_PRECISION for p in trained)


def in_buckets(model: nn.Module, precision: Precision) -> Buckets:
    """Return the gradients of a model in the buckets of DDP."""
    del model, precision
    return Buckets()


class Buckets:
    """Gradients that are views of buckets. A backward pass adds to them, and frees what it has computed."""

    def __init__(self) -> None:
        self._views: dict[nn.Parameter, Tensor] = {}

    def attach(self, train_state: TrainState) -> None:
        """Take the buckets of a train state: parameters in reverse, and a new bucket above 25 MiB."""
        train_state.exchange = None
        train_state.gradients.keeps_memory = True
        bucket: list[nn.Parameter] = []
        for parameter in reversed([p for p in train_state.parameters if p.requires_grad]):
            bucket.append(parameter)
            if sum(p.numel() * p.element_size() for p in bucket) >= EXCHANGE_BYTES:
                self._take(bucket)
                bucket = []
        self._take(bucket)
        for parameter in self._views:
            parameter.register_post_accumulate_grad_hook(self._add)  # type: ignore[no-untyped-call]
        self._show(visible=True)

    def passing(
        self, micro_batches: Iterable[tuple[Collated, int]], count: int
    ) -> Iterator[tuple[Collated, int]]:
        """Yield the micro-batches of a step; their gradients are in the buckets after the last."""
        self._show(visible=False)
        fetched = iter(micro_batches)
        for _ in range(count):
            yield next(fetched)
        self._show(visible=True)

    def _take(self, bucket: list[nn.Parameter]) -> None:
        if not bucket:
            return
        flat = torch.zeros(sum(p.numel() for p in bucket), dtype=bucket[0].dtype, device=bucket[0].device)
        views = torch.split(flat, [p.numel() for p in bucket])
        self._views |= {p: view.view(p.shape) for p, view in zip(bucket, views, strict=True)}

    def _add(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        self._views[parameter].add_(gradient)

    def _show(self, *, visible: bool) -> None:
        for parameter, view in self._views.items():
            parameter.grad = view if visible else None
