"""The search against brute force, over thousands of memory functions and whatever runs may record."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autobatch.core.largest import most_asked
from autobatch.core.records import LimitedBy, Probe
from autobatch.device.allocator import Allocator, CachingAllocator
from autobatch.device.trace import FREE, Trace, replay
from autobatch.rehearsal.rehearsal import Outcome
from autobatch.search.probe import FAR, FIRST, Limit, SavedLimit, find_largest
from tests.support.sizes import BUDGET, Machine, machine_of, outcome_of, trace_of

LINES = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 2000)), min_size=1, max_size=12)


def lines(pairs) -> list:
    return [lambda m, a=slope, b=constant: a * m + b for slope, constant in pairs]


TOPS: list[int] = []
"""The largest size in question in each bound of the latest search."""


def counted(top: int) -> tuple[int, int]:
    TOPS.append(top)
    return most_asked(top)


def find(run: Machine | Callable[[int], Outcome], cap: int, **more: Any) -> Limit:
    run = run.run if isinstance(run, Machine) else run
    caps: dict[LimitedBy, int] = {"max_micro_batch": cap}
    TOPS.clear()
    with patch("autobatch.search.probe.most_asked", counted):
        return find_largest(run, caps, more.pop("new_allocator", lambda: Allocator(BUDGET)), **more)


def answer(found: Limit) -> tuple[int, str | None]:
    return found.probe.micro_batch, found.probe.upper_bound_by


def assert_proven(machine: Machine, found: Probe, cap: int) -> None:
    """Assert that the answer ran and fits, and that the next size does not fit or is above the cap."""
    assert all(1 <= size <= cap for size in machine.asked)
    assert len(machine.asked) == len(set(machine.asked)), "no size is tried twice"
    if found.micro_batch == 0:
        assert not machine.fits(1)
        return
    assert found.micro_batch in machine.asked
    assert machine.fits(found.micro_batch)
    if found.upper_bound_by == "cap":
        assert found.micro_batch == cap
    elif found.upper_bound_by == "run":
        assert found.micro_batch + 1 in machine.asked
        assert not machine.fits(found.micro_batch + 1)
    else:
        assert found.upper_bound_by == "replay"


def assert_within_the_bound(machine: Machine) -> None:
    """Assert at most log2(s) + 3 runs and half of log2(s) + 2 errors, for each s that was in question."""
    assert len(machine.asked) <= sum(math.log2(top) + 3 for top in TOPS)
    assert machine.ooms <= sum(math.log2(top) / 2 + 2 for top in TOPS)


@given(
    share=st.integers(0, 1000),
    cap=st.integers(1, 5000),
    seed=st.integers(0, 2**32),
    structures=st.integers(0, 5),
    guess=st.none() | st.integers(1, 5000),
)
@settings(max_examples=300)
def test_whatever_fits_and_whatever_runs_record_stays_within_the_bound(
    share: int, cap: int, seed: int, structures: int, guess: int | None
) -> None:
    """What fits is drawn at random, and so are the sizes and the number of any blocks."""

    def trace(size: int) -> Trace:
        draw = [hash((seed, size, block)) % (2 * BUDGET) for block in range(1 + size % structures)]
        return Trace(tuple(enumerate(draw)))

    machine = Machine(
        lambda size: 2 * BUDGET * (hash((seed, size)) % 1000 >= share), trace if structures else None
    )
    found = find(machine, cap, known=None if guess is None else SavedLimit(micro_batch=guess))
    assert_proven(machine, found.probe, cap)
    assert structures or found.probe.upper_bound_by != "replay", "nothing is recorded"
    assert_within_the_bound(machine)


SHAPES: dict[str, Callable[[float, float], float]] = {
    "line": lambda m, _: m,
    "bend": lambda m, bend: m**bend,
    "saturation": lambda m, bend: 1 - (m + 1) ** -bend,
    "plateaus": lambda m, bend: math.ceil(m / (1 + 40 * bend)),
    "cliff": lambda m, bend: m > 1000 * bend,
    "holes": lambda m, bend: m * (1 + (m % 7 == 3)),
    "flaky": lambda m, bend: m * (0.95 + hash((bend, m)) % 1000 / 10_000),
}
"""Memory above its fixed part, up to a factor, by the micro-batch and a number between 0 and 3."""


@given(
    shape=st.sampled_from(sorted(SHAPES)),
    bend=st.floats(0.02, 3),
    edge=st.integers(1, 5000),
    fixed=st.integers(0, BUDGET + 10),
    cap=st.integers(1, 5000),
    is_recorded=st.booleans(),
)
@example("saturation", 0.2, 4800, 0, 4700, False)
@example("bend", 0.15625, 976, 4157, 978, True)
@settings(max_examples=200)
def test_memory_of_any_shape_gives_a_proven_limit_in_few_runs(
    shape: str, bend: float, edge: int, fixed: int, cap: int, is_recorded: bool
) -> None:
    """Guesses that creep up on memory that hardly grows take no run for each step."""
    part = (BUDGET - fixed) / max(SHAPES[shape](edge, bend), 1e-9)

    def memory(size: int) -> int:
        return max(fixed + int(part * SHAPES[shape](size, bend)), fixed)

    machine = Machine(memory, (lambda m: trace_of(lambda _: memory(m))(m)) if is_recorded else None)
    found = find(machine, cap)
    assert_proven(machine, found.probe, cap)
    if found.probe.upper_bound_by != "replay":  # which cannot know where rounded memory leaves a line
        assert shape in ("holes", "flaky") or found.probe.micro_batch == machine.limit(cap)
    assert_within_the_bound(machine)
    assert len(machine.asked) <= 4 * math.log2(cap + 1) + 8


# What runs record.


@given(sizes=LINES, cap=st.integers(1, 4000))
@settings(max_examples=100)
def test_two_small_runs_and_their_replay_give_the_limit(sizes, cap: int) -> None:
    machine = machine_of(*lines(sizes))
    found = find(machine, cap).probe
    assert found.micro_batch == machine.limit(cap)
    if found.micro_batch >= 12 and cap > FIRST * FAR:  # up to there one run may ask for the cap
        assert machine.ooms == 0
        assert len(machine.asked) <= 3
        assert found.predicted_micro_batch in (found.micro_batch, None)


def scratch_of_large_sizes(m: int) -> Trace:
    """As the sum of a bias gradient: from 40 rows on it takes a further block, of 64 bytes for 8 rows."""
    scratch = [(1, 64 * -(-m // 8)), (1, FREE)] if m >= 40 else []
    return Trace(((0, 90 * m), *scratch, (2 if scratch else 1, 5)))


def another_block_at_each_size(m: int) -> Trace:
    """At another place, so that no two runs are alike."""
    events = list(enumerate([90 * m, *(3 * number for number in range(30))]))
    at = 2 + m % 29
    events.insert(at, (at, 7))
    later = [(block + 1, size) for block, size in events[at + 1 :]]
    return Trace((*events[: at + 1], (at, FREE), *later))


MACHINES = {
    "a loss over all pairs": (machine_of(lambda m: m * m, lambda m: 7 * m + 3), 3, 0),
    "granules": (
        Machine(lambda m: 90 * m + max(5, 64 * -(-m // 8) * (m >= 40)), scratch_of_large_sizes), 7, 1,
    ),
    "unlike runs": (Machine(lambda m: 90 * m + 3 * sum(range(30)), another_block_at_each_size), 10, 5),
    # As with packed sequences, the bytes depend on values: they grow, but on no line.
    "no line": (machine_of(lambda m: 40 * m + 300 * (m % 3 == 2), lambda m: 7 * m), 11, 5),
}  # fmt: skip


@pytest.mark.parametrize("name", MACHINES)
def test_runs_of_other_structures_give_the_limit_in_few(name: str) -> None:
    machine, runs, errors = MACHINES[name]
    found = find(machine, 5000).probe
    assert_proven(machine, found, 5000)
    assert not machine.fits(found.micro_batch + 1)
    assert len(machine.asked) <= runs
    assert machine.ooms <= errors


def test_the_largest_size_above_a_gap_runs_once_its_structure_is_known() -> None:
    """As on torch's CUDA allocator, a smaller size does not fit although a larger one does."""

    def fits(size: int) -> bool:
        return size <= 768 or 778 < size <= 1280

    class Gapped(CachingAllocator):
        def malloc(self, size: int, stream: int = 0) -> object:
            return super().malloc(size if fits(size // 1000) else 10**9, stream)

    def run(size: int) -> Outcome:
        asked.append(size)
        trace = trace_of(lambda size: 1000 * size)(size)
        said = replay(trace, Gapped(10**8))
        outcome = outcome_of(size, said.fits, said.peak_allocated_bytes, trace)
        peak = msgspec.structs.replace(outcome.attempt, peak_reserved_bytes=said.peak_reserved_bytes)
        return outcome._replace(attempt=peak)

    for guess in (None, 768):  # which is proven first
        asked: list[int] = []
        known = None if guess is None else SavedLimit(micro_batch=guess)
        found = find(run, 5000, new_allocator=lambda: Gapped(10**8), known=known)
        assert answer(found) == (1280, "replay")
        assert all(fits(size) for size in asked)


def test_a_size_that_fails_in_the_other_order_only_brings_that_order_into_the_replay() -> None:
    machine, other = machine_of(*lines([(90, 100), (5, 5)])), machine_of(*lines([(100, 100), (5, 5)]))

    def run(size: int) -> Outcome:
        outcome = machine.run(size)
        if other.fits(size):
            return outcome._replace(other=other.trace(size) if size > 50 else None)
        failed = msgspec.structs.replace(outcome.attempt, fits=False, phase="backward")
        return Outcome(failed, outcome.trace, Trace(other.trace(1).events[:1]))

    assert answer(find(run, 10_000)) == (other.limit(10_000), "replay")
    assert len(machine.asked) <= 8


# Where a search begins and ends.


def test_the_cap_runs_second_if_a_line_says_that_it_fits_with_room() -> None:
    machine = machine_of(lambda m: 10 * m + 100)
    assert answer(find(machine, 200)) == (200, "cap")
    assert machine.asked == [4, 200]


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 7])
def test_a_large_model_begins_with_a_small_size(limit: int) -> None:
    machine = machine_of(lambda _: 6000, lambda m: 4000 * m // (limit + 1) + m, lambda _: 6000)
    found = find(machine, 1000, first=2)
    assert found.probe.micro_batch == machine.limit(1000)
    assert machine.asked[0] == 2
    assert machine.ooms <= 1
    assert limit == 1 or 1 not in machine.asked


def saved(found: Limit, micro_batch: int = 7) -> SavedLimit:
    return SavedLimit(micro_batch=micro_batch, date="2026-11-20", programs=tuple(found.programs))


@pytest.mark.parametrize("budget", [BUDGET // 2, BUDGET, 3 * BUDGET])
def test_known_programs_that_agree_with_a_run_end_the_search_under_any_budget(budget: int) -> None:
    machine = machine_of(*lines([(90, 100), (5, 5)]))
    known = saved(find(machine, 1000))
    machine.asked.clear()
    largest = max(size for size in range(1, 1000) if machine.memory(size) <= budget)
    run = machine.run
    if budget > BUDGET:
        run = lambda size: outcome_of(size, True, machine.memory(size), machine.trace(size))  # noqa: E731
    found = find(run, 1000, known=known, new_allocator=lambda: Allocator(budget))
    assert (*answer(found), found.probe.source) == (largest, "replay", "saved 2026-11-20")
    assert len(found.probe.attempts) == 1


@pytest.mark.parametrize("wrong", [20, 60, 100, 150, 900])
def test_a_guess_that_is_wrong_or_of_another_step_is_only_a_guess(wrong: int) -> None:
    other = find(machine_of(*lines([(50, 700), (5, 5)])), 1000)
    for known in (SavedLimit(micro_batch=wrong), saved(other, wrong)):
        machine = machine_of(*lines([(90, 100), (5, 5)]))
        found = find(machine, 1000, known=known)
        assert machine.asked[0] == wrong or known.programs
        assert (found.probe.micro_batch, found.probe.source) == (machine.limit(1000), "search")
        assert_within_the_bound(machine)


# Sizes that fail for another reason than memory.


def failing(machine: Machine, fails: Callable[[int], bool]) -> Callable[[int], Outcome]:
    """Return runs of a machine that raise at some sizes."""

    def run(size: int) -> Outcome:
        outcome = machine.run(size)
        if not fails(size):
            return outcome
        failed = msgspec.structs.replace(outcome.attempt, fits=False, phase=None, is_error=True)
        return Outcome(failed, None, error=AssertionError(f"{size} fails"))

    return run


def test_an_error_ends_a_search_above_sizes_that_fit_and_is_raised_if_none_does() -> None:
    machine = machine_of(lambda m: 10 * m)
    assert answer(find(failing(machine, lambda size: size > 76), 500)) == (76, "error")
    odd = find(failing(machine, lambda size: size % 2 == 1), 5000).probe
    assert odd.micro_batch % 2 == 0
    assert machine.fits(odd.micro_batch), "a size that fails is no answer"
    with pytest.raises(AssertionError, match="4 fails"):
        find(failing(machine, lambda _: True), 500)
