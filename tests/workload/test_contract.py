"""The fields of a workload, checked when it is made, and those that a DataLoader fills."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from functools import partial
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
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from autobatch import BatchFunction, InputError, WholeBatchLoss, Workload
from autobatch.workload.contract import Loading

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


class Prefetcher:
    """A loader around a loader, as timm's PrefetchLoader."""

    loader = DataLoader(DATA)

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model", 3, "a function, found an int: write model="),
        ("model", nn.Linear(1, 1), "found a Linear that is already built"),
        ("loss", None, "a function, found nothing"),
        ("loss", nn.functional.cross_entropy, r"called as loss\(model, batch\), but cross_entropy"),
        ("loss", nn.MSELoss(), "but MSELoss takes outputs and targets"),
        ("optimizer", torch.optim.SGD(nn.Linear(1, 1).parameters()), "a function, found a SGD"),
        ("collate", 3, "a function, found an int, or leave it out"),
        ("sampler", 3, "must draw .* found an int"),
        ("train_data", None, "must have .* found nothing"),
        ("train_data", [], "has 0 samples"),
        ("train_data", iter([1]), "a list_iterator, which can be read only once, .* give the function"),
        ("train_data", DataLoader(DATA), "found a DataLoader: .*from_loader"),
        ("validation_data", DataLoader(DATA), "found a DataLoader: .*from_loader"),
        ("train_data", Prefetcher(), "found a Prefetcher: .*from_loader"),
        ("validation_data", 3, "must have __getitem__"),
        *[
            ("learning_rate", value, "a finite number over 0")
            for value in (0, "1e-3", True, math.nan, math.inf)
        ],
        *[("base_batch", value, "1 or more, or None") for value in (0, 2.5, True)],
        *[
            ("name", value, "can name a folder")
            for value in ("", "../up", "\x1b[31mred", "x" * 256, "half\ud800", 3)
        ],
    ],
)
def test_an_invalid_field_is_refused_with_what_to_write(field: str, value: object, message: str) -> None:
    with pytest.raises(InputError, match=rf"Workload\({field}=…\) .*{message}"):
        Workload(**{"train_data": DATA} | FIELDS | {field: value})


class Scored(nn.Module):
    def forward(self, batch):  # type: ignore[no-untyped-def]
        return batch


@pytest.mark.parametrize(
    ("field", "function", "called"),
    [
        ("model", lambda size: None, r"\(\)"),
        ("loss", lambda model: None, r"\(model, batch\)"),
        ("loss", Scored(), r"\(model, batch\)"),
        ("optimizer", lambda params: None, r"\(parameters, learning_rate\)"),
        ("collate", lambda: None, r"\(samples\)"),
        ("schedule", lambda: None, r"\(optimizer, steps\)"),
        ("schedule", lambda optimizer, steps, more, steps_per_epoch: None, r"steps, steps_per_epoch\)"),
        ("after_step", lambda model, step: None, r"\(model\)"),
        ("metrics", lambda batch: None, r"\(model, batch\)"),
        ("counts", partial(lambda model, batch: None, batch=1, model=2), r"\(batch\)"),
        ("size_of", lambda *, sample: None, r"\(sample\)"),
    ],
)
def test_a_function_that_takes_other_arguments_is_refused_with_its_line(
    field: str, function: Any, called: str
) -> None:
    line = getattr(getattr(function, "func", function), "__code__", Scored.forward.__code__).co_firstlineno
    message = (
        rf"^Workload\({field}=…\) is called with .*{called}, found a function \(.*test_contract.py:{line}\)"
    )
    with pytest.raises(InputError, match=message):
        Workload(**{"train_data": DATA} | FIELDS | {field: function})
    if field == "loss":
        with pytest.raises(InputError, match=rf"WholeBatchLoss\(represent=…\) .*test_contract.py:{line}\)"):
            WholeBatchLoss(represent=function, loss=max)


@functools.wraps(lambda batch: None)
def wrapped(*args: object) -> None:
    """Take more than what it wraps."""


@pytest.mark.parametrize(
    ("field", "function"),
    [
        ("loss", wrapped),
        ("loss", lambda *args: None),
        ("loss", lambda model, batch, smoothing=0.1: None),
        ("model", nn.Identity),
        ("optimizer", torch.optim.AdamW),
        ("collate", list),
        ("size_of", len),
        ("schedule", partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, epochs=3)),
        ("schedule", math.sqrt),
    ],
)
def test_a_function_that_can_be_called_is_taken(field: str, function: Any) -> None:
    assert getattr(Workload(**{"train_data": DATA} | FIELDS | {field: function}), field) is function


@pytest.mark.parametrize("sampler", [(i for i in range(3)), lambda: [0]])
def test_a_sampler_can_be_iterated_in_every_epoch(sampler: Any) -> None:
    with pytest.raises(InputError, match=r"whenever .*, found a (generator|function): give a list"):
        Workload(**{"train_data": DATA} | FIELDS | {"sampler": sampler})
    with pytest.raises(InputError, match="needs data with an index, found a Numbers, a stream"):
        Workload(train_data=Numbers(), sampler=[1], **FIELDS)


def test_a_whole_batch_loss_takes_functions_and_runs_one_after_the_other() -> None:
    loss = WholeBatchLoss(represent=lambda model, batch: model(batch), loss=lambda model, rows: rows.sum())
    assert loss(nn.Identity(), torch.ones(3)).item() == 3.0
    with pytest.raises(InputError, match=r"WholeBatchLoss\(represent=…\) must be a function, found nothing"):
        WholeBatchLoss(represent=None, loss=max)


# From a DataLoader


class Pairs(BatchSampler):
    """A batch sampler of the user's: neighbours in reverse order."""

    def __init__(self) -> None:
        super().__init__(range(12), 2, drop_last=False)

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter([[1, 0], [3, 2], [5, 4], [7, 6], [9, 8], [11, 10]])


class _RepeatSampler:
    """A sampler without an end, in loaders that keep their workers between epochs."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self):  # type: ignore[no-untyped-def]
        while True:
            yield from self.sampler


class Repeated(list[int]):
    """An order of its own for each rank, as timm's RepeatAugSampler draws."""

    num_replicas = 2


def test_a_sampler_draws_for_all_ranks_together() -> None:
    shared = DistributedSampler(DATA, num_replicas=2, rank=1, shuffle=False)
    found = Workload(train_data=DATA, sampler=shared, **FIELDS).sampler
    assert found is not None
    assert list(found) == list(range(12))

    class Own(DistributedSampler[Any]):
        pass

    message = (
        r"Workload\(sampler=…\) is an? \w+ that draws the part of 1 of 2 ranks, but a plan splits .*: make it"
    )
    for sampler in (Repeated([1, 2]), Own(DATA, 2, 0), BatchSampler(Repeated([1, 2]), 2, drop_last=False)):
        with pytest.raises(InputError, match=message):
            Workload(train_data=DATA, sampler=sampler, **FIELDS)
        options: Any = {"batch_sampler" if isinstance(sampler, BatchSampler) else "sampler": sampler}
        with pytest.raises(InputError, match=message):
            Workload.from_loader(DataLoader(DATA, **options), **FIELDS)
    alone = Own(DATA, 1, 0)
    assert Workload(train_data=DATA, sampler=alone, **FIELDS).sampler is alone


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with one CPU
def test_everything_but_the_batch_size_is_taken() -> None:
    stack, init = list, print
    loader = DataLoader(DATA, batch_size=5, collate_fn=stack, num_workers=2, worker_init_fn=init)
    validation = TensorDataset(torch.arange(3.0))
    workload = Workload.from_loader(loader, validation_data=DataLoader(validation), **FIELDS, name="points")
    assert workload.train_data is DATA
    assert workload.validation_data is validation
    assert workload.collate is stack
    assert workload.loading == Loading(workers=2, pin_memory=False, init_worker=init)
    assert workload.name == "points"
    stream = Numbers()
    of_stream = Workload.from_loader(DataLoader(stream, batch_size=2), **FIELDS)
    assert (of_stream.train_data, of_stream.sampler, of_stream.collate) == (stream, None, None)


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
        ({"sampler": [3, 1]}, [3, 1]),
        ({"batch_sampler": Pairs()}, [[1, 0], [3, 2], [5, 4], [7, 6], [9, 8], [11, 10]]),
        ({"batch_sampler": _RepeatSampler(BatchSampler(RandomSampler(DATA), 4, drop_last=True))}, None),
        ({"batch_sampler": _RepeatSampler(Pairs())}, [[1, 0], [3, 2], [5, 4], [7, 6], [9, 8], [11, 10]]),
    ],
)
def test_the_order_is_taken_unless_it_is_a_permutation(
    options: dict[str, Any], order: list[Any] | None
) -> None:
    found = Workload.from_loader(DataLoader(DATA, **options), **FIELDS).sampler
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
    assert Workload.from_loader(DataLoader(DATA, sampler=sampler), **FIELDS).sampler is sampler


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([1, 2], "takes a torch DataLoader, found a list: give its data as Workload"),
        (Prefetcher(), "takes a torch DataLoader, found a Prefetcher"),
        (DataLoader(DATA, batch_size=None), "has batch_size=None, so its items may be batches already"),
    ],
)
def test_anything_else_than_a_loader_of_batches_is_refused(loader: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Workload.from_loader(loader, **FIELDS)


def test_a_workload_shows_its_name_its_samples_and_its_rate() -> None:
    data = {"1,024 samples": range(1024), "a stream": lambda: iter([1]), "1 sample": [0]}
    for amount, found in data.items():
        shown = repr(Workload(**FIELDS, train_data=found, name="mine"))
        assert shown == f"<Workload mine: {amount}, learning rate 0.1>"
    assert "a stream" in repr(Workload(**FIELDS, train_data=BatchFunction(lambda size, step: None)))
