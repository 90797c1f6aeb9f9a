"""Traces that know whole numbers, against real attempts on the same batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autobatch.core.options import Options
from autobatch.footprint.tracing.fakes import MOST_ELEMENTS, fake_with_values, has_values, new_mode, value_of
from autobatch.footprint.tracing.trace_step import record
from autobatch.setup.attempt import attempt
from autobatch.setup.setup import open_setup
from autobatch.setup.trace import setting_of
from tests.support.packed import WORKLOADS
from tests.support.probes import work


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_trace_of_packed_sequences_is_that_of_an_attempt(name: str) -> None:
    made = open_setup(WORKLOADS[name](), Options().with_values(device="cpu", memory_budget="1GiB"))
    known = replace(setting_of(made), has_values=True)
    found = [record(known, size).trace for size in (9, 14)]
    assert found == [attempt(made, size).trace.canonical() for size in (9, 14)]
    assert found[0].events != found[1].events


class Selecting(nn.Module):
    """A model whose memory depends on how many words are even."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids)[ids % 2 == 0].square().mean() * int(ids.max())


def test_selections_by_known_values_keep_what_a_run_keeps() -> None:
    rows = list(torch.randint(50, (20, 6), generator=torch.Generator().manual_seed(3)))
    workload = work(Selecting, train_data=rows, loss=lambda model, ids: model(ids))
    made = open_setup(workload, Options().with_values(device="cpu", memory_budget="1GiB"))
    known = record(replace(setting_of(made), has_values=True), 7)
    assert known.trace == attempt(made, 7).trace.canonical()
    assert not known.has_selections


class Spoken(torch.utils.data.Dataset):
    """Sounds of many lengths, with texts of many lengths."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.ones(20 + index * index % 13, 4), torch.ones(1 + index % 7, dtype=torch.long)


def aligned(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sounds, texts = zip(*samples, strict=True)
    lengths = (torch.tensor([len(one) for one in each]) for each in (sounds, texts))
    return nn.utils.rnn.pad_sequence(list(sounds)), torch.cat(texts), *lengths


def test_ctc_keeps_columns_for_the_longest_text() -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        sounds, *texts = batch
        return nn.functional.ctc_loss(model(sounds).log_softmax(-1), texts[0], texts[1], texts[2])

    workload = work(lambda: nn.Linear(4, 6), train_data=Spoken(), collate=aligned, loss=loss)
    made = open_setup(workload, Options().with_values(device="cpu", memory_budget="1GiB"))
    known = record(replace(setting_of(made), has_values=True), 7)
    assert known.trace == attempt(made, 7).trace.canonical()


def test_a_fake_keeps_its_values_while_the_real_tensor_changes() -> None:
    real = torch.tensor([3, 1, 2])
    fake = fake_with_values(real, new_mode())
    real.zero_()
    assert value_of(fake).tolist() == [3, 1, 2]


def test_only_few_whole_numbers_have_values() -> None:
    assert has_values(torch.tensor([True]))
    assert not has_values(torch.ones(2))
    assert not has_values(torch.zeros(MOST_ELEMENTS + 1, dtype=torch.int8))
