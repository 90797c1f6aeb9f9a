"""The arithmetic of a plan over ranks; `tests/scenarios/test_ranks.py` trains with such plans."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from autobatch.core.records import DeviceRecord, SizeCut
from autobatch.distributed.ranks import Ranks, agree_on_cut, agree_on_limit
from tests.support.probes import probe_of


class Told(Ranks):
    """Ranks that give these values."""

    def __init__(self, *values: Any) -> None:
        self.values, self.world = values, len(values)

    def gather(self, value: Any) -> list[Any]:
        return [*self.values]


def test_the_least_limit_holds_for_all_ranks_and_names_its_gpu() -> None:
    """Rank 1 has the least: its limit, its evidence and its part of a plan count."""
    limits = [
        replace(probe_of(8), limited_by="target_batch", upper_bound_by="cap"),
        replace(probe_of(3), limited_by="memory", upper_bound_by="replay"),
        replace(probe_of(9), limited_by="memory", upper_bound_by="run"),
    ]
    of_ranks = [*zip(limits, (8, 2, 7), ("A on x", "B on y", "A on z"), strict=True)]
    device = DeviceRecord(kind="cpu", name="A", total_bytes=2000, budget_bytes=5, budget_source="as set")
    found, planned, note = agree_on_limit(Told(*of_ranks), limits[0], 8, device)
    assert (found.micro_batch, found.limited_by, found.upper_bound_by) == (3, "memory", "replay")
    assert (found.world_size, planned) == (3, 2)
    assert "at most 3, as fit on rank 1 (B on y), although 9 fit" in note
    assert agree_on_limit(Told(*of_ranks[:1] * 2), limits[0], 8, device)[2] is None


def cut_of(limit: int, most: int, digest: str = "same") -> SizeCut:
    return SizeCut(longest=64.0, micro_batch=limit, max_micro_batch=most, digest=digest)


def test_ranks_agree_on_the_least_cut_and_split_by_count_if_one_does_or_has_other_samples() -> None:
    own = cut_of(2, 16)
    assert agree_on_cut(Told(own, cut_of(3, 12)), own) == cut_of(2, 12)
    assert agree_on_cut(Told(own, None), own) is None
    assert agree_on_cut(Told(own, cut_of(2, 16, digest="other")), own) is None
