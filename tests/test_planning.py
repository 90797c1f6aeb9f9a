"""The batch arithmetic against brute force, and the learning-rate rules against golden numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch import InputError, Plan
from autobatch.planning import (
    even_split,
    launched_world_size,
    learning_rate_factor,
    make_plan,
    micro_batches,
    nearest_even_targets,
    samples_of_rank,
)


@given(st.integers(1, 5000), st.integers(1, 700))
def test_micro_batches_are_exact_even_and_as_few_as_possible(target: int, limit: int) -> None:
    sizes = micro_batches(target, limit)
    assert sum(sizes) == target
    assert max(sizes) <= limit
    assert max(sizes) - min(sizes) <= 1
    # One step fewer cannot hold the target: the oracle is the pigeonhole principle.
    assert (len(sizes) - 1) * limit < target


def test_the_number_of_steps_matches_brute_force() -> None:
    for target in range(1, 60):
        for limit in range(1, 60):
            fewest = next(k for k in range(1, target + 1) if k * limit >= target)
            assert len(micro_batches(target, limit)) == fewest


@given(st.integers(1, 3000), st.integers(1, 64), st.integers(1, 300))
def test_the_ranks_together_take_the_target_batch(target: int, world_size: int, limit: int) -> None:
    if target < world_size:
        with pytest.raises(InputError, match=f"{target} over {world_size}"):
            make_plan(target_batch=target, micro_batch_limit=limit, learning_rate=1.0, world_size=world_size)
        return
    shares = [samples_of_rank(target, world_size, rank) for rank in range(world_size)]
    assert sum(sum(micro_batches(share, limit)) for share in shares) == target
    plan = make_plan(target_batch=target, micro_batch_limit=limit, learning_rate=1.0, world_size=world_size)
    assert plan.effective_batch == target
    assert sum(plan.micro_batches) == max(shares)
    assert plan.accumulation_steps == len(plan.micro_batches)
    assert plan.micro_batch == max(plan.micro_batches) <= limit


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
    assert learning_rate_factor(rule, target_batch=target, base_batch=base) == factor  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", ["linear", "sqrt"])
def test_a_rule_needs_a_base_batch(rule: str) -> None:
    with pytest.raises(InputError, match="--base-batch"):
        learning_rate_factor(rule, target_batch=8, base_batch=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_equal_micro_batches_are_the_largest_that_fit(ranks: int) -> None:
    for share in range(1, 61):
        for limit in range(1, 70):
            plan = make_plan(
                target_batch=share * ranks, micro_batch_limit=limit, learning_rate=0.1, world_size=ranks
            )
            size, steps = even_split(plan)
            # The plan's own micro-batch is the largest that the search certified for this split.
            assert size * steps == share
            assert size <= plan.micro_batch <= limit
            assert not [bigger for bigger in range(size + 1, plan.micro_batch + 1) if share % bigger == 0]


def test_equal_micro_batches_are_multiples_of_what_a_workload_insists_on() -> None:
    plan = make_plan(target_batch=18, micro_batch_limit=4, learning_rate=0.1, multiple=2)
    assert even_split(plan) == (2, 9), "3 divides 18 too"
    with pytest.raises(InputError, match=r"12 over 2 ranks gives unequal shares in multiples of 4.*8 or 16"):
        even_split(
            make_plan(target_batch=12, micro_batch_limit=4, learning_rate=0.1, world_size=2, multiple=4)
        )


def test_unequal_shares_are_refused_with_targets_that_divide() -> None:
    with pytest.raises(InputError, match=r"24 over 5 ranks.*ask for 20 or 25"):
        even_split(make_plan(target_batch=24, micro_batch_limit=7, learning_rate=0.1, world_size=5))


@pytest.mark.parametrize(
    ("base", "words"),
    [
        (None, "kept as declared; the batch that it was tuned for is unknown (base_batch)"),
        (1024, "kept as declared: it was tuned for this batch"),
        (
            256,
            "kept as declared, but it was tuned for a batch of 256 and this one is 4 × as large: the "
            "linear rule gives 0.0012, the sqrt rule 0.0006, and --tune-lr measures",
        ),
    ],
)
def test_a_learning_rate_that_is_kept_says_for_which_batch_it_was_tuned(base: int | None, words: str) -> None:
    plan = make_plan(target_batch=1024, micro_batch_limit=64, learning_rate=3e-4, base_batch=base)
    assert plan.learning_rate == 3e-4
    assert plan.learning_rate_source == words


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_nearest_even_targets_are_found_as_by_trying_all(ranks: int) -> None:
    for target in range(1, 40):
        for limit in (1, 3, 7, 20):
            good = [
                other
                for other in range(ranks, 90, ranks)
                if even_split(_plan(other, limit, ranks))[1] == _plan(other, limit, ranks).accumulation_steps
            ]
            below = [other for other in good if other < target][-1:]
            above = [other for other in good if other > target][:1]
            assert nearest_even_targets(target, ranks, limit) == below + above


@pytest.mark.parametrize(
    ("environ", "expected"), [({}, 1), ({"WORLD_SIZE": "1"}, 1), ({"WORLD_SIZE": "8"}, 8)]
)
def test_the_ranks_of_a_launcher_are_read(environ: dict[str, str], expected: int) -> None:
    assert launched_world_size(environ) == expected


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "²", ""])
def test_an_invalid_number_of_ranks_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"WORLD_SIZE of the environment is .* a whole number, 1 or more"):
        launched_world_size({"WORLD_SIZE": text})


def _plan(target: int, limit: int, ranks: int = 1) -> Plan:
    return make_plan(target_batch=target, micro_batch_limit=limit, learning_rate=0.1, world_size=ranks)
