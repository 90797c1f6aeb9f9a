"""The knobs of ranks whose micro-batches differ."""

from __future__ import annotations

from typing import Any

import pytest

from autobatch.core.errors import InputError
from autobatch.core.knobs import KNOBS, PRECISION, SPLIT, SearchAxis
from autobatch.distributed.ranks import Alone
from autobatch.tuning.common_axes import common_axes

PRECISIONS = SearchAxis(PRECISION, ("fp32", "bf16"))
TWICE, ONCE = SearchAxis(SPLIT, (0, 1, 2)), SearchAxis(SPLIT, (0, 1))


class Two(Alone):
    """A rank beside another one, which has other knobs."""

    world = 2

    def __init__(self, other: list[SearchAxis]) -> None:
        self.other = {axis.name: list(axis.choices) for axis in other}

    def gather(self, value: Any) -> list[Any]:
        return [value, dict(self.other)]


@pytest.mark.parametrize(
    ("own", "other"),
    [
        ([TWICE, PRECISIONS], [ONCE, PRECISIONS]),
        ([ONCE, PRECISIONS], [TWICE, PRECISIONS]),
        ([PRECISIONS], [TWICE, PRECISIONS]),
        ([TWICE, PRECISIONS], [PRECISIONS]),
    ],
)
def test_the_micro_batch_is_halved_as_often_as_on_any_rank(
    own: list[SearchAxis], other: list[SearchAxis]
) -> None:
    order = [knob.name for knob in KNOBS]
    expected = sorted([TWICE, PRECISIONS], key=lambda axis: order.index(axis.name))
    assert common_axes(own, Two(other)) == expected


def test_other_knobs_must_be_alike() -> None:
    for own, other in (([PRECISIONS], []), ([], [PRECISIONS])):
        with pytest.raises(InputError, match="the ranks differ in the knob precision: rank 1 has"):
            common_axes(own, Two(other))


def test_one_process_keeps_its_own() -> None:
    assert common_axes([ONCE], Alone()) == [ONCE]
