"""The exchange of rows, on one of two ranks whose other one is a fake."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from autobatch.distributed.engine import OutOfMemory
from autobatch.distributed.row_gather import PeerOutOfMemory, RowGather
from autobatch.step.loss_share import StepTotals
from autobatch.step.whole_batch import Rows


class Group:
    """The second of two ranks."""

    rank = 1

    def __init__(self, *, other_fails: bool = False) -> None:
        self.other_fails = other_fails
        self.votes: list[bool] = []

    def agree(self, flag: bool) -> bool:
        self.votes.append(flag)
        return flag or self.other_fails

    def meeting(self) -> Any:
        return nullcontext()


def gather_of(group: Group, other: torch.Tensor | None = None) -> RowGather:
    def reduce(tensor: torch.Tensor) -> None:
        tensor += 0 if other is None else other.reshape(-1).view(torch.uint8)

    return RowGather(group, reduce, lambda: torch.ones(1, 2, dtype=torch.bfloat16))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.int64])
def test_rows_arrive_bit_for_bit_whatever_their_type(dtype: torch.dtype) -> None:
    whole = torch.tensor([[-1.5, 0.0], [float("nan"), 3.0], [7.0, -0.0]]).to(dtype)
    other = whole.clone()
    other[1] = 0
    rows = Rows(3)
    rows.put([1], whole[1:2])
    gather = gather_of(Group(), other)
    gather.begin()
    gather.gather(rows)
    assert torch.equal(rows.collated.view(torch.uint8), whole.view(torch.uint8))
    assert not gather.counts_loss


def test_a_rank_without_samples_makes_room_for_the_rows_of_others() -> None:
    rows = Rows(4)
    gather = gather_of(Group(), torch.full((4, 2), 2.0, dtype=torch.bfloat16))
    gather.begin()
    gather.gather(rows)
    assert rows.collated.tolist() == [[2.0, 2.0]] * 4


def test_ranks_vote_once_before_the_rows_travel() -> None:
    totals, oom = StepTotals(samples=3), OutOfMemory("full", size=2, smaller=1)
    group = Group()
    gather = gather_of(group)
    gather.begin()
    assert gather.ended(oom) is oom  # its own error, before the rows: the others wait for the vote
    assert group.votes == [True]
    gather.begin()
    gather.gather(Rows(1))
    assert gather.ended(totals) is totals
    assert gather.ended(oom) is oom  # after the rows: nobody waits
    assert group.votes == [True, False]


def test_a_rank_whose_peer_failed_has_no_error_of_its_own() -> None:
    gather = gather_of(Group(other_fails=True))
    gather.begin()
    with pytest.raises(PeerOutOfMemory):
        gather.gather(Rows(1))
    assert gather.ended(OutOfMemory("memory ran out on another rank", size=2)) == OutOfMemory("")
