"""A ``DataLoader`` of the same data with another batch size, which a loader cannot change itself."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from autobatch.core.errors import InputError
from autobatch.workload.contract import kind_of

_KEPT = (
    "dataset",
    "collate_fn",
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)
"""Arguments of a loader that it keeps as attributes, besides those that make its batches."""


def check_resizable(loader: Any, *, before: str) -> None:
    """Check that a loader can be built again with another batch size.

    Args:
        loader: the user's loader.
        before: the call of the library that replaces loaders by its own.

    Raises:
        InputError: it cannot; the message says why.
    """
    if type(loader) is not DataLoader and not _is_stateful(loader):
        raise InputError(
            f"the loader must be a torch DataLoader before {before}, found {kind_of(loader)}: plan first, "
            "then give plan.loader to the library"
        )
    if loader.batch_size is None and loader.batch_sampler is None:
        raise InputError(
            "the loader has batch_size=None, so its data make the batches, whose size cannot be changed: "
            "give single samples and a batch_size"
        )
    if loader.batch_size is None and type(loader.batch_sampler) is not BatchSampler:
        raise InputError(
            f"the loader has {kind_of(loader.batch_sampler)} that makes its batches, whose size cannot be "
            "changed: give it a sampler in place of a batch sampler"
        )


def resized(loader: DataLoader[Any], size: int) -> DataLoader[Any]:
    """Return a loader of the same kind and data with another batch size, in samples."""
    kept = {name: getattr(loader, name) for name in _KEPT}
    batches: Any = loader.batch_sampler
    if not isinstance(loader.dataset, IterableDataset):  # a stream has an order of its own
        kept["sampler"] = batches.sampler
    return type(loader)(batch_size=size, drop_last=batches.drop_last, **kept)


def drops_last(loader: DataLoader[Any]) -> bool:
    """Return whether a loader leaves out a last batch that is short, as its batch sampler knows."""
    return bool(getattr(loader.batch_sampler, "drop_last", False))


def _is_stateful(loader: Any) -> bool:
    """Check for torchdata's loader, which takes the same arguments."""
    kind = type(loader)
    return kind.__name__ == "StatefulDataLoader" and kind.__module__.partition(".")[0] == "torchdata"
