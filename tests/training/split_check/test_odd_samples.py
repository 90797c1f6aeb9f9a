"""Odd samples are those that a wrong loss may weigh differently: rare classes, short texts, masks."""

from __future__ import annotations

import pytest
import torch

from autobatch.training.split_check.odd_samples import MOST_ODD, odd_samples, odd_sizes

N = 100


def labels(rare: int) -> torch.Tensor:
    values = torch.arange(N) % 3
    values[rare] = 7
    return values


def masks(short: int, dtype: torch.dtype) -> torch.Tensor:
    values = torch.ones(N, 12)
    values[short, 5:] = 0
    return values.to(dtype)


@pytest.mark.parametrize(
    "batch",
    [
        labels(41),
        {"labels": labels(41), "inputs": torch.randn(N, 5, 5)},
        [masks(41, torch.bool), torch.randint(9, (N,))],
        (masks(41, torch.float32),),
        (masks(41, torch.int64) - 1, torch.zeros(3)),
    ],
    ids=["class", "class beside images", "mask of bools", "mask of numbers", "ignored labels"],
)
def test_the_sample_that_differs_is_among_the_first_odd_ones(batch) -> None:
    found = odd_samples(batch, N)
    assert 41 in found[:4]
    assert len(set(found)) == len(found) <= MOST_ODD


def test_samples_without_any_difference_are_not_odd() -> None:
    assert odd_samples(torch.zeros(N, 4), N) == []
    assert odd_samples([torch.arange(N), torch.zeros(()), torch.zeros(N, 2, dtype=torch.cfloat)], N) == []
    assert odd_samples({"rows": torch.zeros(7, N)}, N) == []


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 8, 40])
@pytest.mark.parametrize("samples", [*range(2, 20), 100])
def test_sizes_cover_all_samples_and_no_part_is_single(samples: int, micro_batch: int) -> None:
    for odd in range(min(MOST_ODD, samples // 2) + 1):
        sizes = odd_sizes(samples, odd, micro_batch)
        assert sum(sizes) == samples
        assert min(sizes) == 1 if micro_batch == 1 else min(sizes) >= 2
        assert sizes[: odd // 2] == [2] * (odd // 2) or micro_batch == 1
        assert max(sizes) <= max(micro_batch + 1, 3)
