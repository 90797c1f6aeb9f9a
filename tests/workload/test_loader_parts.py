"""A workload out of a DataLoader: what is taken, what is left, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from autobatch.core.errors import InputError
from autobatch.workload.contract import Loading, Workload, parts_of

DATA = TensorDataset(torch.arange(12.0))
OTHERS: dict[str, Any] = {
    "model": lambda: torch.nn.Linear(1, 1),
    "loss": lambda model, batch: model(batch[0]).mean(),
    "optimizer": lambda params, learning_rate: torch.optim.SGD(params, lr=learning_rate),
    "learning_rate": 0.1,
}


def stack(samples: list[Any]) -> Any:
    return torch.stack([one for (one,) in samples])


class Pairs(BatchSampler):
    """A batch sampler of the user's: neighbours in reverse order."""

    def __init__(self) -> None:
        super().__init__(range(12), 2, drop_last=False)

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter([[1, 0], [3, 2], [5, 4], [7, 6], [9, 8], [11, 10]])


class Numbers(IterableDataset[int]):
    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(range(3))


def init(number: int) -> None:
    del number


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with one CPU
def test_everything_but_the_batch_size_is_taken() -> None:
    loader = DataLoader(
        DATA, batch_size=5, collate_fn=stack, num_workers=2, prefetch_factor=3, worker_init_fn=init
    )
    workload = Workload.from_loader(loader, **OTHERS, name="points")
    assert workload.train_data is DATA
    assert workload.collate is stack
    assert workload.loading == Loading(workers=2, prefetch=3, pin_memory=False, init_worker=init)
    assert workload.name == "points"


def test_the_default_collate_function_stays_the_default() -> None:
    assert parts_of(DataLoader(DATA, batch_size=5))["collate"] is None


@pytest.mark.parametrize(
    ("options", "order"),
    [
        ({"shuffle": True}, None),
        ({"sampler": RandomSampler(DATA)}, None),
        ({"batch_sampler": BatchSampler(RandomSampler(DATA), 4, drop_last=True)}, None),
        ({"sampler": DistributedSampler(DATA, num_replicas=2, rank=1)}, None),
        ({}, list(range(12))),
        ({"sampler": DistributedSampler(DATA, num_replicas=2, rank=1, shuffle=False)}, list(range(12))),
        ({"batch_sampler": BatchSampler(SequentialSampler(DATA), 4, drop_last=False)}, list(range(12))),
        ({"sampler": Subset(range(12), [3, 1])}, [3, 1]),
        ({"batch_sampler": Pairs()}, [[1, 0], [3, 2], [5, 4], [7, 6], [9, 8], [11, 10]]),
    ],
)
def test_the_order_is_taken_unless_it_is_a_permutation(
    options: dict[str, Any], order: list[Any] | None
) -> None:
    found = parts_of(DataLoader(DATA, **options))["sampler"]
    assert (found if found is None else list(found)) == order


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler([1.0] * 12, 6),
        SubsetRandomSampler([1, 2]),
        RandomSampler(DATA, replacement=True),
        RandomSampler(DATA, num_samples=5),
    ],
)
def test_other_samplers_are_kept(sampler: Any) -> None:
    assert parts_of(DataLoader(DATA, sampler=sampler))["sampler"] is sampler


def test_a_stream_has_no_sampler() -> None:
    assert parts_of(DataLoader(Numbers(), batch_size=2))["sampler"] is None


def test_validation_data_may_be_a_loader() -> None:
    other = TensorDataset(torch.arange(3.0))
    workload = Workload.from_loader(DataLoader(DATA), validation_data=DataLoader(other), **OTHERS)
    assert workload.validation_data is other


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([1, 2], "takes a torch DataLoader, found list: give its data as Workload"),
        (DataLoader(DATA, batch_size=None), "has batch_size=None, so its items may be batches already"),
    ],
)
def test_anything_else_is_refused_with_advice(loader: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Workload.from_loader(loader, **OTHERS)


@pytest.mark.parametrize("field", ["train_data", "validation_data"])
def test_a_loader_in_place_of_data_names_the_way_in(field: str) -> None:
    with pytest.raises(InputError, match=rf"found a DataLoader: write Workload\.from_loader.*{field}=loader"):
        Workload(**{"train_data": DATA} | OTHERS | {field: DataLoader(DATA)})


def test_a_sampler_must_be_iterable() -> None:
    with pytest.raises(InputError, match=r"Workload\(sampler=…\) must draw .* found an int"):
        Workload(train_data=DATA, sampler=3, **OTHERS)
