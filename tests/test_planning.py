"""The batch arithmetic against brute force, and the learning-rate rules against golden numbers."""

from __future__ import annotations

import math
import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import autobatch
from autobatch import InputError
from autobatch.planning import even_split, even_split_note, launched_world_size, make_plan


def plan(target: int, limit: int, ranks: int = 1, multiple: int = 1) -> autobatch.Plan:
    return make_plan(
        target_batch=target,
        micro_batch_limit=limit,
        learning_rate=0.1,
        world_size=ranks,
        multiple=multiple,
    )


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
    ("rule", "target", "base", "factor"),
    [
        ("none", 1024, 256, 1.0),
        ("none", 1024, None, 1.0),
        ("linear", 1024, 256, 4.0),
        ("linear", 64, 256, 0.25),
        ("sqrt", 1024, 256, 2.0),
        ("sqrt", 512, 256, math.sqrt(2)),
        ("linear", 256, 256, 1.0),
        ("sqrt", 256, 256, 1.0),
    ],
)
def test_learning_rate_factors_match_golden_numbers(
    rule: str, target: int, base: int | None, factor: float
) -> None:
    options = {"target_batch": target, "micro_batch_limit": 8, "learning_rate": 0.5, "rule": rule}
    found = make_plan(base_batch=base, **options)  # type: ignore[arg-type]
    assert (found.learning_rate_factor, found.learning_rate) == (factor, 0.5 * factor)
    if rule != "none":
        with pytest.raises(InputError, match="--base-batch"):
            make_plan(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("base", "words"),
    [
        (None, "kept as declared; the batch that it was tuned for is unknown (base_batch)"),
        (1024, "kept as declared: it was tuned for this batch"),
        (
            256,
            "kept as declared, but it was tuned for a batch of 256, and this one is 1,024: the "
            "linear rule gives 0.0012, the sqrt rule 0.0006, and --tune-lr measures",
        ),
    ],
)
def test_a_learning_rate_that_is_kept_says_for_which_batch_it_was_tuned(base: int | None, words: str) -> None:
    found = make_plan(target_batch=1024, micro_batch_limit=64, learning_rate=3e-4, base_batch=base)
    assert (found.learning_rate, found.learning_rate_source) == (3e-4, words)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_equal_micro_batches_are_the_largest_that_fit(ranks: int) -> None:
    for share in range(1, 61):
        for limit in range(1, 70):
            found = plan(share * ranks, limit, ranks)
            size = even_split(found)[0]
            # The plan's own micro-batch is the largest that the search certified for this split.
            divisors = [one for one in range(1, found.micro_batch + 1) if share % one == 0]
            assert size == max(divisors) <= found.micro_batch <= limit


def test_equal_micro_batches_are_multiples_and_of_equal_shares() -> None:
    assert even_split(plan(18, 4, multiple=2))[0] == 2, "3 divides 18 too"
    with pytest.raises(InputError, match=r"12 over 2 ranks gives unequal shares in multiples of 4.*8 or 16"):
        even_split(plan(12, 4, 2, multiple=4))
    with pytest.raises(InputError, match=r"24 over 5 ranks.*ask for 20 or 25"):
        even_split(plan(24, 7, 5))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_nearest_even_targets_are_found_as_by_trying_all(ranks: int) -> None:
    def steps_lost(target: int, limit: int) -> int:
        made = plan(target, limit, ranks)
        return target // ranks // even_split(made)[0] - made.accumulation_steps

    advised = 0
    for target in range(ranks, 60, ranks):
        for limit in (3, 7, 20):
            made = plan(target, limit, ranks)
            good = [one for one in range(ranks, 120, ranks) if not steps_lost(one, made.micro_batch)]
            near = [one for one in good if one < target][-1:] + [one for one in good if one > target][:1]
            note = even_split_note(made)
            if note is not None:
                found = re.search(r"a target batch of ([\d or]+) needs fewer", note)
                assert found is not None
                assert list(map(int, found[1].split(" or "))) == near
                advised += 1
    assert advised > 5


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "²", ""])
def test_an_invalid_number_of_launched_ranks_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", text)
    with pytest.raises(InputError, match=r"WORLD_SIZE of the environment is .* a whole number, 1 or more"):
        launched_world_size(os.environ)
