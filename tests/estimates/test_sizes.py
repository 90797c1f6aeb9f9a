"""Sizes of samples in an estimate, against estimates of samples of one size."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from autobatch.estimates.estimator import estimate_limits
from tests.support.options import as_options
from tests.support.ragged import Sequences, joined_workload, ragged_workload, wide_model
from tests.support.training import tokens

SETTINGS = as_options("estimate", profile=["t4"], memory_budget="40MiB", target_batch=96)


class UpTo(Sequences):
    """The sequences of at most a length."""

    def __getitem__(self, index: int):
        ids, labels = super().__getitem__(index)
        return ids[: self.cut], labels[: self.cut]


def estimate(home: Path, **changes):
    workload = ragged_workload(**{"model": wide_model, **changes})
    return estimate_limits(workload, SETTINGS, home=home).estimates[0]


def test_each_size_has_the_limit_of_samples_up_to_that_size(tmp_path: Path) -> None:
    one = estimate(tmp_path, train_data=Sequences(samples=300, longest=60))
    assert one.size_unit == "tokens"
    assert one.lengths[-1].size == 60
    assert one.lengths[-1].micro_batch == one.micro_batch < 96
    assert one.lengths[0].micro_batch == 96
    middle = one.lengths[len(one.lengths) * 3 // 4]
    shorter = UpTo(samples=300, longest=60)
    shorter.cut = int(middle.size)
    alone = estimate(tmp_path, train_data=shorter)
    assert 0.9 * alone.micro_batch <= middle.micro_batch <= alone.micro_batch_high
    assert one.size_cut.padding < one.size_cut.padding_by_count


class Again(nn.Module):
    """Give rows of tokens a dimension of their samples again."""

    def forward(self, rows):
        return rows.unsqueeze(0)


def test_a_split_by_size_is_left_out_where_it_is_not_possible(tmp_path: Path) -> None:
    def normalised() -> nn.Module:
        return nn.Sequential(
            nn.Embedding(7, 32), nn.Flatten(0, 1), nn.BatchNorm1d(32), nn.Linear(32, 7), Again()
        )

    data = Sequences(samples=300, longest=60)
    assert estimate(tmp_path, train_data=data, model=normalised).size_cut is None
    assert estimate_limits(joined_workload(), SETTINGS, home=tmp_path).estimates[0].size_cut is None
    equal = estimate(tmp_path, train_data=tokens(), collate=None, size_of=None)
    assert (equal.lengths, equal.size_cut) == ([], None)
