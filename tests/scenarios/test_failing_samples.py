"""A sample that raises is named by its index, or by its position in a stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset

import autobatch
from autobatch.cli.output import describe_failure
from autobatch.core.errors import UserCodeError
from tests.support.training import make_workload, points

BROKEN = 23
POINTS = points(32)


def sample(index: int) -> Any:
    if index == BROKEN:
        raise ValueError("no such picture")
    return POINTS[index]


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        return sample(index)


class FetchingMany(Samples):
    def __getitems__(self, ids: list[int]) -> list[Any]:
        return [sample(index) for index in ids]


@pytest.mark.parametrize(
    ("data", "options", "place"),
    [
        (Samples(), {"workers": 2}, "train_data[23]"),
        (FetchingMany(), {}, "train_data"),
        (lambda: map(sample, range(32)), {"scan": 16}, "train_data at position 23"),
        (lambda: map(sample, range(32)), {}, "train_data at position 23"),
    ],
    ids=["workers", "many at once", "stream in training", "stream in the scan"],
)
def test_a_sample_that_raises_is_named(
    data: Any, options: dict[str, Any], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("autobatch.workload.streams.SCAN", options.pop("scan", 1000))
    workload = make_workload(train_data=data, size_of=lambda _: 1.0)
    with pytest.raises((ValueError, UserCodeError), match="no such picture") as caught:
        autobatch.fit(workload, target_batch=8, steps=4, trials=0, device="cpu", **options)
    report = describe_failure(caught.value)
    assert report.exit_code == 2
    assert report.line.startswith(f"the workload's {place} raised ValueError: no such picture ({__file__}:")


def test_a_validation_sample_that_raises_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    workload = make_workload(validation_data=Samples())
    with pytest.raises(ValueError, match="no such picture") as caught:
        autobatch.fit(workload, target_batch=8, steps=1, trials=0, device="cpu")
    assert describe_failure(caught.value).line.startswith("the workload's validation_data[23] raised")
