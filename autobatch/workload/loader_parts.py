"""The parts of a ``DataLoader`` besides its batch size: data, collation, order and processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from autobatch.core.errors import InputError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


@dataclass(frozen=True, kw_only=True)
class Loading:
    """The processes that load samples, as arguments of a ``DataLoader`` name them."""

    workers: int | None = None
    """Loader processes, unless an option or the tuner says otherwise; None for 0."""
    prefetch: int | None = None
    """Micro-batches that each process is ahead by; None for torch's default of 2."""
    pin_memory: bool = True
    """Copy what the processes load to pinned memory, if the device reads it."""
    init_worker: Callable[[int], object] | None = None
    """Called in each process with its number; None for nothing."""


class LoaderParts(NamedTuple):
    """Fields of a `autobatch.workload.contract.Workload` that a ``DataLoader`` fills."""

    train_data: Any
    collate: Callable[[list[Any]], Any] | None
    sampler: Iterable[Any] | None
    loading: Loading


def parts_of(loader: DataLoader[Any]) -> LoaderParts:
    """Return the parts of a loader. Its batch size, ``drop_last`` and ``timeout`` are left.

    Raises:
        InputError: it is no ``DataLoader``, or it yields what its data yield, without making batches.
    """
    from torch.utils.data import DataLoader
    from torch.utils.data._utils.collate import default_collate

    if not isinstance(loader, DataLoader):
        raise InputError(
            f"Workload.from_loader takes a torch DataLoader, found {type(loader).__name__}: give its data as "
            "Workload(train_data=…)"
        )
    if loader.batch_sampler is None and loader.batch_size is None:
        raise InputError(
            "Workload.from_loader needs a loader that makes batches, and this one has batch_size=None, so "
            "its items may be batches already: give a loader of single samples, or use "
            "autobatch.batches(loader, plan, batched=True) in your own loop"
        )
    return LoaderParts(
        train_data=loader.dataset,
        collate=None if loader.collate_fn is default_collate else loader.collate_fn,
        sampler=_sampler_of(loader),
        loading=Loading(
            workers=loader.num_workers,
            prefetch=loader.prefetch_factor,
            pin_memory=loader.pin_memory,
            init_worker=loader.worker_init_fn,
        ),
    )


def _sampler_of(loader: DataLoader[Any]) -> Iterable[Any] | None:
    """Return the order of an epoch, of samples or of batches; None for a permutation per epoch."""
    from torch.utils.data import BatchSampler, IterableDataset, RandomSampler
    from torch.utils.data.distributed import DistributedSampler

    data: Any = loader.dataset
    if isinstance(data, IterableDataset):
        return None
    batches = loader.batch_sampler
    sampler: Any = batches
    if batches is None or type(batches) is BatchSampler:
        sampler = loader.sampler if batches is None else batches.sampler
    if isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(data):
        return None
    if isinstance(sampler, DistributedSampler):
        # A plan splits each batch over the ranks itself, so it needs all samples.
        return None if sampler.shuffle else range(len(data))
    return sampler  # type: ignore[no-any-return]
