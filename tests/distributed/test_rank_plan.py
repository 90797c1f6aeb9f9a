"""The arithmetic of a plan over ranks; `tests/scenarios/test_ranks.py` trains with such plans."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from autobatch.core.records import DeviceRecord, SizeCut
from autobatch.distributed.rank_plan import agree_on_cut, agree_on_limit
from autobatch.distributed.ranks import Ranks
from tests.support.probes import probe_of


class Told(Ranks):
    """Ranks that give these values."""

    host = "x"

    def __init__(self, *values: Any) -> None:
        self.values, self.world = values, len(values)

    def gather(self, value: Any) -> list[Any]:
        return [*self.values]


DEVICE = DeviceRecord(kind="cpu", name="A", total_bytes=2000, budget_bytes=5, budget_source="as set")


def limit_of(micro_batch: int, limited_by: str, upper_bound_by: str) -> Any:
    return msgspec.structs.replace(
        probe_of(micro_batch), limited_by=limited_by, upper_bound_by=upper_bound_by
    )


def test_the_least_limit_holds_for_all_ranks_and_names_its_gpu() -> None:
    """Rank 1 has the least: its limit, its evidence and its part of a plan count."""
    limits = (
        limit_of(8, "target_batch", "cap"),
        limit_of(3, "memory", "replay"),
        limit_of(9, "memory", "run"),
    )
    of_ranks = zip(limits, (8, 2, 7), ("A on x", "B on y", "A on z"), strict=True)
    found, planned, note = agree_on_limit(Told(*of_ranks), limits[0], 8, DEVICE)
    assert (found.micro_batch, found.limited_by, found.upper_bound_by) == (3, "memory", "replay")
    assert (found.world_size, planned) == (3, 2)
    assert note is not None
    assert "at most 3, as fit on rank 1 (B on y), although 9 fit" in note
    assert agree_on_limit(Told(*[(limits[0], 8, "A on x")] * 2), limits[0], 8, DEVICE)[2] is None


def cut_of(limit: int, most: int, digest: str = "same") -> SizeCut:
    return SizeCut(longest=64.0, micro_batch=limit, max_micro_batch=most, digest=digest)


def test_ranks_agree_on_the_least_limit() -> None:
    assert agree_on_cut(Told(cut_of(2, 16), cut_of(3, 12)), cut_of(2, 16)) == cut_of(2, 12)


@pytest.mark.parametrize("other", [None, cut_of(2, 16, digest="other")])
def test_all_ranks_split_by_count_if_one_does_or_has_other_samples(other: SizeCut | None) -> None:
    assert agree_on_cut(Told(cut_of(2, 16), other), cut_of(2, 16)) is None
