"""The fields of a workload, checked when it is made, and those that a DataLoader fills."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
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

from autobatch import InputError, WholeBatchLoss, Workload
from autobatch.workload.contract import Loading, kind_of, parts_of

DATA = TensorDataset(torch.arange(12.0))
FIELDS: dict[str, Any] = {
    "model": lambda: None,
    "loss": lambda model, batch: None,
    "optimizer": lambda params, learning_rate: None,
    "learning_rate": 0.1,
}


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def generate() -> Iterator[int]:
    yield from range(10)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model", 3, r"Workload\(model=…\) must be a function, found an int"),
        ("model", nn.Linear(1, 1), r"found a Linear that is already built: write model=lambda: …"),
        ("loss", None, r"Workload\(loss=…\) must be a function, found nothing"),
        (
            "loss",
            nn.functional.cross_entropy,
            r"called as loss\(model, batch\), but cross_entropy takes outputs and targets: write loss=lambda",
        ),
        ("loss", nn.MSELoss(), r"but MSELoss takes outputs and targets"),
        (
            "optimizer",
            torch.optim.SGD(nn.Linear(1, 1).parameters()),
            r"optimizer=…\) must be a function, found a SGD: write optimizer=lambda params, learning_rate:",
        ),
        ("collate", 3, r"Workload\(collate=…\) must be a function or None, found an int"),
        ("schedule", [], r"Workload\(schedule=…\) must be a function or None, found a list"),
        ("sampler", 3, r"Workload\(sampler=…\) must draw .* found an int"),
        ("train_data", None, r"Workload\(train_data=…\) must have .* found nothing"),
        ("train_data", [], r"Workload\(train_data=…\) has 0 samples: at least 1 is needed"),
        ("train_data", iter([1]), r"is a list_iterator, which can be read only once, .* give the function"),
        ("train_data", generate(), r"is a generator, which can be read only once"),
        (
            "train_data",
            DataLoader(DATA),
            r"found a DataLoader: .*from_loader.*train_data=loader",
        ),
        ("validation_data", DataLoader(DATA), r"from_loader.*validation_data=loader"),
        ("validation_data", 3, r"Workload\(validation_data=…\) must have __getitem__"),
        ("learning_rate", 0, "must be a finite number over 0, found 0"),
        ("learning_rate", "1e-3", "must be a finite number over 0, found '1e-3'"),
        ("learning_rate", True, "must be a finite number over 0, found True"),
        ("learning_rate", float("nan"), "must be a finite number over 0, found nan"),
        ("learning_rate", float("inf"), "must be a finite number over 0, found inf"),
        ("base_batch", 0, r"Workload\(base_batch=…\) must be 1 or more, or None, found 0"),
        ("base_batch", 2.5, r"must be 1 or more, or None, found 2.5"),
        ("base_batch", True, r"must be 1 or more, or None, found True"),
        ("name", "", r"Workload\(name=…\) must be text that can name a folder, found ''"),
        ("name", "../up", r"can name a folder, found '../up'"),
        ("name", "\x1b[31mred", r"can name a folder, found '\\x1b\[31mred'"),
        ("name", "x" * 256, r"can name a folder, found 'xx"),
        ("name", "half\ud800", r"can name a folder, found 'half\\ud800'"),
        ("name", 3, r"can name a folder, found 3"),
    ],
)
def test_an_invalid_field_is_refused_with_what_to_write(field: str, value: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Workload(**{"train_data": DATA} | FIELDS | {field: value})


def test_a_sampler_needs_data_with_an_index() -> None:
    with pytest.raises(InputError, match="needs data with an index, found a Numbers, a stream"):
        Workload(train_data=Numbers(), sampler=[1], **FIELDS)


def test_a_whole_batch_loss_takes_functions_and_runs_one_after_the_other() -> None:
    loss = WholeBatchLoss(represent=lambda model, batch: model(batch), loss=lambda model, rows: rows.sum())
    assert loss(nn.Identity(), torch.ones(3)).item() == 3.0
    with pytest.raises(InputError, match=r"WholeBatchLoss\(represent=…\) must be a function, found nothing"):
        WholeBatchLoss(represent=None, loss=max)


def test_the_type_of_a_value_is_described() -> None:
    assert [kind_of(value) for value in ([], 3, None)] == ["a list", "an int", "nothing (None)"]


# From a DataLoader


class Pairs(BatchSampler):
    """A batch sampler of the user's: neighbours in reverse order."""

    def __init__(self) -> None:
        super().__init__(range(12), 2, drop_last=False)

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter([[1, 0], [3, 2], [5, 4], [7, 6], [9, 8], [11, 10]])


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with one CPU
def test_everything_but_the_batch_size_is_taken() -> None:
    stack, init = list, print
    loader = DataLoader(
        DATA, batch_size=5, collate_fn=stack, num_workers=2, prefetch_factor=3, worker_init_fn=init
    )
    validation = TensorDataset(torch.arange(3.0))
    workload = Workload.from_loader(loader, validation_data=DataLoader(validation), **FIELDS, name="points")
    assert workload.train_data is DATA
    assert workload.validation_data is validation
    assert workload.collate is stack
    assert workload.loading == Loading(workers=2, prefetch=3, pin_memory=False, init_worker=init)
    assert workload.name == "points"
    assert parts_of(DataLoader(DATA, batch_size=5))["collate"] is None
    stream = Numbers()
    parts = parts_of(DataLoader(stream, batch_size=2))
    assert (parts["train_data"], parts["sampler"]) == (stream, None)


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


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([1, 2], "takes a torch DataLoader, found a list: give its data as Workload"),
        (DataLoader(DATA, batch_size=None), "has batch_size=None, so its items may be batches already"),
    ],
)
def test_anything_else_than_a_loader_of_batches_is_refused(loader: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Workload.from_loader(loader, **FIELDS)
