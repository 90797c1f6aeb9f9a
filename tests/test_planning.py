"""The batch arithmetic against brute force, and the learning-rate rules against golden numbers."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import autobatch
from autobatch import InputError
from autobatch.planning import equal_parts_note, make_plan, with_equal_parts


def plan(target: int, limit: int, ranks: int = 1, **options: Any) -> autobatch.Plan:
    rate = {"learning_rate": 5e-4}
    return make_plan(target_batch=target, micro_batch_limit=limit, world_size=ranks, **{**rate, **options})


@given(st.integers(1, 5000), st.integers(1, 64), st.integers(1, 700))
def test_micro_batches_are_exact_even_and_as_few_as_possible(target: int, ranks: int, limit: int) -> None:
    if target < ranks:
        with pytest.raises(InputError, match=f"{target:,} over {ranks}"):
            plan(target, limit, ranks)
        return
    found = plan(target, limit, ranks)
    sizes, share = found.micro_batches, math.ceil(target / ranks)
    assert (found.effective_batch, found.accumulation_steps, sum(sizes)) == (target, len(sizes), share)
    assert found.micro_batch == max(sizes) <= limit
    assert max(sizes) - min(sizes) <= 1
    # One step fewer cannot hold the share: the oracle is the pigeonhole principle.
    assert (len(sizes) - 1) * limit < share


@pytest.mark.parametrize(
    ("rule", "target", "base", "factor", "word"),
    [
        ("none", 1024, 256, 1.0, "0.002, the sqrt rule 0.001, "),
        ("none", 1024, None, 1.0, "unknown"),
        ("linear", 1024, 256, 4.0, "arXiv:1706.02677"),
        ("linear", 64, 256, 0.25, "arXiv:1706.02677"),
        ("sqrt", 512, 256, math.sqrt(2), "arXiv:2205.10287"),
        ("sqrt", 256, 256, 1.0, "arXiv:2205.10287"),
    ],
)
def test_learning_rate_factors_match_golden_numbers(
    rule: str, target: int, base: int | None, factor: float, word: str
) -> None:
    found = plan(target, 8, base_batch=base, rule=rule)
    assert (found.learning_rate_factor, found.learning_rate) == (factor, 5e-4 * factor)
    assert word in found.learning_rate_source
    if rule != "none":
        with pytest.raises(InputError, match="base_batch"):
            plan(target, 8, rule=rule)


@pytest.mark.parametrize("ranks", [1, 3])
def test_equal_micro_batches_are_the_largest_that_fit_and_a_better_multiple_is_named(ranks: int) -> None:
    advised = 0
    for share in range(1, 61):
        for limit in (1, 3, 7, 20, 64):
            found = with_equal_parts(plan(share * ranks, limit, ranks))
            size = max(one for one in range(1, limit + 1) if share % one == 0)
            assert found.micro_batches == [size] * (share // size)
            assert (found.micro_batch, found.accumulation_steps) == (size, share // size)
            note = equal_parts_note(found, limit)
            assert (note is None) == (2 * size > min(limit, share))
            if note is not None:
                advised += 1
                targets = [int(number) for number in re.findall(r"\d+", note.partition("Target batches")[2])]
                assert targets[-1] > share * ranks > max([0, *targets[:-1]])
                for target in targets:
                    steps = with_equal_parts(plan(target, limit, ranks)).accumulation_steps
                    assert steps <= math.ceil(share / limit)
    assert advised > 5


def test_equal_micro_batches_are_multiples_and_of_equal_shares() -> None:
    assert with_equal_parts(plan(18, 4, multiple=2)).micro_batch == 2, "3 divides 18 too"
    with pytest.raises(InputError, match=r"12 over 2 ranks gives unequal shares in multiples of 4.*8 or 16"):
        with_equal_parts(plan(12, 4, 2, multiple=4))
    with pytest.raises(InputError, match=r"24 over 5 ranks.*ask for 20 or 25"):
        with_equal_parts(plan(24, 7, 5))
