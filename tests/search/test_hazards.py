"""Workloads that must not, or need not, be split by size, each with its reason."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from autobatch import Loss, WholeBatchLoss, Workload
from autobatch.search.hazards import find_obstacle
from tests.support.ragged import CONTRASTIVE, Sequences, pad, ragged_workload
from tests.support.training import (
    IGNORED,
    fingerprint,
    info_nce,
    language_model,
    make_setup,
    make_workload,
    token_loss,
    tokens,
)


class Pooled(nn.Module):
    """Classifies a sequence by the mean over its positions, pads included."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, ids):
        return self.head(self.embed(ids).mean(1))


def pooled_loss(model, batch):
    return cross_entropy(model(batch[0]), torch.zeros(len(batch[0]), dtype=torch.long))


def mean_over_tokens(model, batch):
    loss = token_loss(model, batch)
    return loss.total / loss.count


def padded_to_four(samples):
    if len(samples) not in (1, 4):
        raise ValueError("4 samples only")
    return pad(samples)


def filled_to_four(samples):
    return [torch.nn.functional.pad(one, (0, 0, 0, 4 - len(samples))) for one in pad(samples)]


class Resized(Sequences):
    """Sequences that are cut anew each time that they are read."""

    def __getitem__(self, index):
        ids, labels = super().__getitem__(index)
        length = int(torch.randint(1, 9, ()))
        return ids[:length], labels[:length]


class Masked(Sequences):
    """Sequences of which the long ones are masked anew each time that they are read."""

    def __getitem__(self, index):
        ids, labels = super().__getitem__(index)
        return ids, labels.masked_fill(torch.rand(len(labels)) < 0.5 * (len(labels) > 12), IGNORED)


def random_loss(model, batch):
    found = token_loss(model, batch)
    return Loss(found.total * torch.rand(()), found.count)


def broken(model, batch):
    raise ValueError("broken")


def boxes(model: nn.Module, batch: Any) -> torch.Tensor:
    rows = model(torch.stack(batch[0]))
    errors = [(row - own).square().sum() for row, own in zip(rows, batch[1], strict=True)]
    return torch.stack(errors).sum() / sum(map(len, batch[1]))


def detection() -> Workload:
    """Make images of one size, each with its own number of boxes."""
    draw = torch.Generator().manual_seed(0)
    data = [(torch.randn(5, generator=draw), torch.rand(1 + n % 6, 3, generator=draw)) for n in range(60)]
    return make_workload(
        model=lambda: nn.Linear(5, 3),
        train_data=data,
        collate=lambda samples: tuple(zip(*samples, strict=True)),
        loss=boxes,
        size_of=lambda sample: len(sample[1]),
    )


@pytest.mark.parametrize(
    "changes",
    [{}, {"loss": CONTRASTIVE}, {"loss": random_loss}, {"train_data": Masked()}, {"loss": broken}],
    ids=["mask", "contrastive", "a loss that draws", "data that draw", "another stage reports the error"],
)
def test_a_workload_that_ignores_its_padding_can_be_split_by_size(changes) -> None:
    """What draws at random is given the benefit of the doubt."""
    setup = make_setup(ragged_workload(**changes))
    before, drawn = fingerprint(setup.model), torch.get_rng_state()
    assert find_obstacle(setup) is None
    assert fingerprint(setup.model) == before
    assert torch.equal(torch.get_rng_state(), drawn)


def normalised() -> nn.Module:
    return nn.Sequential(language_model(), nn.BatchNorm1d(7))


def in_rows(represent) -> WholeBatchLoss:
    return WholeBatchLoss(represent=represent, loss=info_nce)


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        (ragged_workload(model=normalised), "BatchNorm"),
        (ragged_workload(loss=in_rows(lambda m, b: m(b[0]))), "the row of sample"),
        (ragged_workload(loss=in_rows(lambda m, b: m(b[0]).mean(1))), "the row of sample"),
        (ragged_workload(model=Pooled, loss=pooled_loss), "depends on its padding"),
        (ragged_workload(loss=mean_over_tokens), "depends on its padding"),
        (detection(), "though it is not padded: .* or is a mean over something else than samples"),
    ],
)
def test_wrong_results_are_hazards(workload: Workload, words: str) -> None:
    found = find_obstacle(make_setup(workload))
    assert found is not None
    assert found.is_hazard
    assert re.search(words, found.reason)


@pytest.mark.parametrize(
    ("changes", "words", "knobs"),
    [
        ({"train_data": tokens(), "collate": None, "size_of": None}, "one size", {}),
        ({"collate": padded_to_four}, "takes a fixed number", {}),
        ({"collate": filled_to_four}, "up to a fixed number", {}),
        ({"size_of": lambda sample: float(sample[0].sum() * 7919 % 31)}, "does not explain memory", {}),
        ({"train_data": Resized(), "size_of": lambda sample: len(sample[0])}, "at random", {}),
        ({}, "compile", {"compile": "default"}),
    ],
)
def test_what_gains_nothing_is_no_hazard(changes, words: str, knobs) -> None:
    found = find_obstacle(replace(make_setup(ragged_workload(**changes)), knobs=knobs))
    assert found is not None
    assert not found.is_hazard
    assert words in found.reason


def test_sizes_that_were_not_all_read_are_no_base_for_a_split(monkeypatch) -> None:
    setup = make_setup(ragged_workload(train_data=Sequences(samples=500)))
    ticks = itertools.count(step=10.0)
    monkeypatch.setattr(setup.worst_case, "_clock", lambda: next(ticks))
    assert "unknown" in find_obstacle(setup).reason
