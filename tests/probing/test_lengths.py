"""The table from length to micro-batch, against real attempts on samples of those lengths alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autobatch.core.progress import Progress
from autobatch.probing.attempt import attempt_at
from autobatch.probing.child import ThisProcess
from autobatch.probing.find_limit import ProbeLimits, find_limit, find_limits_by_size
from autobatch.probing.setup import SetupSettings, open_setup
from autobatch.workload.contract import Workload

LENGTHS = [8, 8, 8, 16, 16, 32, 32, 64]


class Sequences(torch.utils.data.Dataset[Tensor]):
    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(self.lengths[index], 4)


def make(lengths: list[int]) -> Workload:
    return Workload(
        model=lambda: nn.Linear(4, 16),
        train_data=Sequences(lengths),
        collate=lambda samples: nn.utils.rnn.pad_sequence(samples, batch_first=True),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda params, rate: torch.optim.SGD(params, lr=rate),
        learning_rate=0.1,
    )


def probe(lengths: list[int], home: Path):
    options = SetupSettings(device="cpu", memory_budget="100KiB")
    setup = open_setup(make(lengths * 30), options)
    process, limits = ThisProcess(setup), ProbeLimits()
    found = find_limit(process, limits, home=home, progress=Progress()).probe
    return setup, find_limits_by_size(process, limits, found, progress=Progress())


def test_every_length_has_the_largest_micro_batch_of_its_own(tmp_path: Path) -> None:
    setup, found = probe(LENGTHS, tmp_path)
    assert [limit.size for limit in found.lengths] == [32, 64, 128, 256]
    sizes = [limit.micro_batch for limit in found.lengths]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == found.micro_batch
    for limit in found.lengths:
        assert attempt_at(setup, limit.micro_batch, limit.size).attempt.fits
        assert not attempt_at(setup, limit.micro_batch + 1, limit.size).attempt.fits


def test_samples_that_cost_alike_have_no_table(tmp_path: Path) -> None:
    setup, found = probe([16], tmp_path)
    assert setup.worst_case.size_quartiles() == []
    assert found.lengths == []


@pytest.mark.parametrize(("costs", "size_quartiles"), [([1, 2, 3, 4], [1, 2, 3, 4]), ([5, 5, 5, 9], [5, 9])])
def test_levels_are_the_quartiles(costs: list[int], size_quartiles: list[int]) -> None:
    setup = open_setup(make(costs), SetupSettings(device="cpu", memory_budget="1MiB"))
    assert setup.worst_case.size_quartiles() == [4.0 * level for level in size_quartiles]
