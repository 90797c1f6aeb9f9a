"""The fields of a workload, checked when it is made, and those that a DataLoader fills."""

from __future__ import annotations

import math
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
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from autobatch import InputError, Workload

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


class Repeated(list[int]):
    """An order of its own for each rank, as timm's RepeatAugSampler draws."""

    num_replicas = 2


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model", nn.Linear(1, 1), "found a Linear that is already built"),
        ("loss", None, "a function, found nothing"),
        ("loss", nn.functional.cross_entropy, "cross_entropy takes outputs and targets: write loss=lambda"),
        ("loss", nn.MSELoss(), "MSELoss takes outputs and targets"),
        ("loss", lambda m, x, y: m(x), r"is called as loss\(model, batch\), and cannot be: missing .* 'y'"),
        ("optimizer", lambda params: params, r"\(parameters, learning_rate\), and cannot be: too many"),
        ("optimizer", torch.optim.SGD(nn.Linear(1, 1).parameters()), "found a SGD: write optimizer="),
        ("collate", 3, "found an int: leave it out"),
        ("sampler", 3, "found an int"),
        ("sampler", (i for i in range(3)), "whenever .*, found a generator: give a list"),
        ("sampler", Repeated([1, 2]), "the part of 1 of 2 ranks"),
        ("sampler", BatchSampler(Repeated([1, 2]), 2, drop_last=False), "the part of 1 of 2 ranks"),
        ("train_data", None, "found nothing"),
        ("train_data", [], "has 0 samples"),
        ("train_data", (), "has 0 samples"),
        ("train_data", torch.zeros(0), "has 0 samples"),
        ("train_data", "mnist", "found a str, .*Dataset"),
        ("train_data", {"x": torch.zeros(3)}, "found a dict, .*TensorDataset"),
        ("train_data", (torch.zeros(3, 2), torch.zeros(3)), "found a tuple, .*TensorDataset"),
        ("train_data", iter([1]), "read only once, .* give the function"),
        ("train_data", DataLoader(DATA), "found a DataLoader: .*from_loader"),
        ("validation_data", 3, "found an int, .*Dataset"),
        *[("learning_rate", value, "finite") for value in (0, "1e-3", True, math.nan, math.inf)],
        *[("base_batch", value, "1 or more") for value in (0, 2.5, True)],
        *[("name", value, "folder") for value in ("", "..", "a/b", "\x1b[31mred", "x" * 256)],
    ],
)
def test_an_invalid_field_is_refused_with_what_to_write(field: str, value: object, message: str) -> None:
    with pytest.raises(InputError, match=rf"Workload\({field}=…\) .*{message}"):
        Workload(**{"train_data": DATA} | FIELDS | {field: value})


def test_a_stream_takes_no_sampler() -> None:
    with pytest.raises(InputError, match="needs data with an index, found a Numbers, a stream"):
        Workload(train_data=Numbers(), sampler=[1], **FIELDS)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with one CPU
def test_everything_but_the_batch_size_of_a_loader_is_taken() -> None:
    loader = DataLoader(DATA, batch_size=5, collate_fn=list, num_workers=2, worker_init_fn=print)
    validation = TensorDataset(torch.arange(3.0))
    workload = Workload.from_loader(loader, validation_data=DataLoader(validation), **FIELDS, name="points")
    assert (workload.train_data, workload.validation_data, workload.collate) == (DATA, validation, list)
    assert (workload.workers, workload.init_worker) == (2, print)
    assert workload.name == "points"
    stream = Numbers()
    of_stream = Workload.from_loader(DataLoader(stream, batch_size=2), **FIELDS)
    assert (of_stream.train_data, of_stream.sampler, of_stream.collate) == (stream, None, None)


WEIGHTED, REPLACED = WeightedRandomSampler([1.0] * 12, 6), RandomSampler(DATA, replacement=True)
PAIRS: Any = [[1, 0], [3, 2]]


@pytest.mark.parametrize(
    ("options", "order"),
    [
        ({"shuffle": True}, None),
        ({"batch_sampler": BatchSampler(RandomSampler(DATA), 4, drop_last=True)}, None),
        ({"sampler": DistributedSampler(DATA, num_replicas=2, rank=1)}, None),
        ({"sampler": DistributedSampler(DATA, num_replicas=2, rank=1, shuffle=False)}, range(12)),
        ({"batch_sampler": BatchSampler([3, 1], 4, drop_last=False)}, [3, 1]),
        ({"batch_sampler": PAIRS}, PAIRS),
        ({"sampler": WEIGHTED}, WEIGHTED),
        ({"sampler": REPLACED}, REPLACED),
    ],
)
def test_the_order_is_taken_unless_it_is_a_permutation(options: dict[str, Any], order: Any) -> None:
    assert Workload.from_loader(DataLoader(DATA, **options), **FIELDS).sampler == order


@pytest.mark.parametrize(
    ("loader", "message"),
    [([1, 2], "found a list"), (DataLoader(DATA, batch_size=None), "may be batches already")],
)
def test_anything_else_than_a_loader_of_batches_is_refused(loader: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Workload.from_loader(loader, **FIELDS)
