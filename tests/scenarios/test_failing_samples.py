"""A sample that raises is named by its index, or by its position in a stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import autobatch
from autobatch.cli.output import describe_failure
from autobatch.core.errors import UserCodeError
from tests.support.training import Rows, make_workload, points

POINTS = points(32)


class Samples(Rows):
    def __getitem__(self, index: int) -> Any:
        if index == 23:
            raise ValueError("no such picture")
        return super().__getitem__(index)


class FetchingMany(Samples):
    def __getitems__(self, ids: list[int]) -> list[Any]:
        return [self[index] for index in ids]


DATA = Samples(*POINTS.columns)


@pytest.mark.parametrize(
    ("fields", "options", "place"),
    [
        ({"train_data": DATA}, {"workers": 2}, "train_data[23]"),
        ({"train_data": FetchingMany(*POINTS.columns)}, {}, "train_data"),
        ({"train_data": lambda: map(DATA.__getitem__, range(32))}, {"scan": 16}, "train_data at position 23"),
        ({"train_data": lambda: map(DATA.__getitem__, range(32))}, {}, "train_data at position 23"),
        ({"train_data": POINTS, "validation_data": DATA}, {}, "validation_data[23]"),
    ],
    ids=["workers", "many at once", "stream in training", "stream in the scan", "validation"],
)
def test_a_sample_that_raises_is_named(
    fields: dict[str, Any], options: dict[str, Any], place: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("autobatch.workload.streams.SCAN", options.pop("scan", 1000))
    with pytest.raises((ValueError, UserCodeError), match="no such picture") as caught:
        autobatch.fit(make_workload(**fields), target_batch=8, steps=4, trials=0, device="cpu", **options)
    line, code, _ = describe_failure(caught.value)
    assert code == 2
    assert line.startswith(f"the workload's {place} raised ValueError: no such picture ({__file__}:")
