"""Streams over ranks: the samples of one process, whoever reads them."""

from __future__ import annotations

import fractions
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

import autobatch
from autobatch.distributed.shared_stream import open_sampler, split_note
from autobatch.workload.streams import StreamSampler
from tests.support.options import as_options
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group
from tests.support.training import apart, fingerprint, make_workload, points, weights

COMMON: dict[str, Any] = {
    "trials": 0,
    "target_batch": 7,
    "device": "cpu",
    "memory_budget": "1GiB",
    "max_micro_batch": 2,
}


class InOrder(IterableDataset[Any]):
    """Points in their order."""

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        data = points(23)
        return (data[place] for place in range(23))


def fit(out: str, options: dict[str, Any]) -> tuple[str, list[float], list[str]]:
    """Train on a stream; return the fingerprint and the values of the weights, and the notes."""
    torch.set_num_threads(1)
    notes: list[str] = []

    class Noting(autobatch.Progress):
        def note(self, line: str) -> None:
            notes.append(line)

    workload = make_workload(train_data=InOrder(), name="stream")
    result = autobatch.fit(workload, out=out, progress=Noting(), **{**COMMON, **options})
    assert result.model is not None
    return fingerprint(result.model), weights(result.model).tolist(), notes


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("options", "worlds"),
    [
        ({"steps": 4}, (2,)),
        pytest.param({"epochs": 2}, (3,), marks=pytest.mark.slow),
        pytest.param({"steps": 6}, (3, 2, 1), marks=pytest.mark.slow, id="resumed on other ranks"),
    ],
    ids=str,
)
def test_ranks_train_on_the_stream_of_one_process(
    server: RankServer, tmp_path: Path, options: dict[str, Any], worlds: tuple[int, ...]
) -> None:
    _, expected, _ = fit(str(tmp_path / "alone"), options)
    out = str(tmp_path / "run")
    for number, world in enumerate(worlds, 1):
        part = options if number == len(worlds) else {"steps": 2 * number}
        found = server.values(fit, out, {**part, "resume": number > 1}, world=world)
    assert len({one[0] for one in found}) == 1
    assert apart(torch.tensor(found[0][1]), torch.tensor(expected)) < 1e-12
    assert not any("split by rank" in line for line in found[0][2])


def send_samples() -> tuple[bool, int]:
    """Send samples of every kind that are parts of larger memory; return whether they arrive, and bytes."""
    group = open_group()
    samples = [
        [torch.arange(20.0).reshape(4, 5).T[1:], torch.tensor(2.5, dtype=torch.bfloat16), torch.zeros(0, 3)],
        {"text": "a", "more": (np.float32(0.5), fractions.Fraction(1, 3), None)},
        torch.zeros(1000, 1000)[3],
    ]
    options = as_options("fit", target_batch=3, steps=1)
    sampler = open_sampler(make_workload(), lambda: iter(samples), group, options)
    assert isinstance(sampler, StreamSampler)
    tensors, plain, row = sampler.reader.read(3)
    note = split_note(group.rank, group)
    group.close()
    is_same = all(map(torch.equal, tensors, samples[0])) and plain == samples[1]  # type: ignore[arg-type]
    return is_same and "it must not be split by rank" in str(note), row.untyped_storage().nbytes()


@pytest.mark.distributed
def test_samples_arrive_without_the_memory_around_them_and_ranks_that_read_others_are_told(
    server: RankServer,
) -> None:
    assert server.values(send_samples) == [(True, 4000)] * 2
