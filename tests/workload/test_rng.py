"""Random generators: captured, restored and seeded."""

from __future__ import annotations

import random
from contextlib import suppress

import numpy as np
import pytest
import torch

from autobatch.workload.rng import (
    capture_random_state,
    preserved_random_state,
    restore_random_state,
    seed_everything,
    seed_generators,
    seed_torch,
)


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_all_generators_are_restored_at_the_end_of_the_block() -> None:
    state = capture_random_state()
    first = draws()
    restore_random_state(state)
    with preserved_random_state():
        assert draws() == first
        draws()
    assert draws() == first


def test_all_generators_are_restored_after_an_error() -> None:
    state = capture_random_state()
    first = draws()
    restore_random_state(state)
    with suppress(KeyError), preserved_random_state():
        draws()
        raise KeyError
    assert draws() == first


def test_torch_is_seeded_as_by_its_own_function_and_no_stack_traces_are_kept() -> None:
    torch.manual_seed(2**40 + 3)
    first = torch.rand(5)
    kept = len(torch.cuda._queued_calls), len(torch.xpu._queued_calls)
    seed_torch(2**40 + 3)
    assert torch.equal(torch.rand(5), first)
    if not torch.cuda.is_available():
        assert (len(torch.cuda._queued_calls), len(torch.xpu._queued_calls)) == kept


def test_one_seed_seeds_all_generators() -> None:
    seed_everything(3)
    first = draws()
    draws()
    seed_everything(3)
    assert draws() == first
    seed_everything(4)
    assert all(one != other for one, other in zip(draws(), first, strict=True))


def test_seeds_that_differ_in_one_number_give_unrelated_draws() -> None:
    found = []
    for key in [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 0, -1)]:
        seed_generators(*key)
        found.append(draws())
    assert all(len(set(column)) == len(found) for column in zip(*found, strict=True))


@pytest.mark.parametrize("normals", [0, 1, 2])
def test_a_state_after_an_earlier_one_is_that_of_a_fresh_read(normals: int) -> None:
    np.random.normal(size=normals)
    last = capture_random_state()
    for draw in (lambda: None, lambda: None, np.random.normal, np.random.normal, np.random.random):
        draw()
        last = capture_random_state(last)
        fresh = capture_random_state()
        assert last.numpy is not None
        assert fresh.numpy is not None
        assert np.array_equal(last.numpy[1], fresh.numpy[1])
        assert last.numpy[2:] == fresh.numpy[2:]


def test_the_state_of_numpy_is_read_again_only_after_a_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    np.random.seed(0)
    last = capture_random_state()
    reads: list[int] = []
    read = np.random.get_state
    monkeypatch.setattr(np.random, "get_state", lambda: reads.append(1) or read())
    again = capture_random_state(last)
    assert (again.numpy, reads) == (last.numpy, [])
    np.random.random()
    capture_random_state(again)
    assert reads == [1]
    # 312 draws of two words each move the place to where it was: the words tell.
    before = capture_random_state()
    np.random.random(312)
    after = capture_random_state(before).numpy
    assert before.numpy is not None
    assert after is not None
    assert after[2] == before.numpy[2]
    assert not np.array_equal(after[1], before.numpy[1])


def test_the_state_of_python_is_read_again_only_after_a_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    read = random.getstate
    monkeypatch.setattr(random, "getstate", lambda: reads.append(1) or read())
    first = capture_random_state()
    assert capture_random_state(first).python is first.python
    for draw in (
        random.random,
        lambda: random.gauss(0, 1),
        lambda: random.gauss(0, 1),
        lambda: random.seed(3),
    ):
        before = capture_random_state()
        draw()
        assert capture_random_state(before).python == read()
    # 624 draws of 32 bits move the place to where it was: the words tell.
    before = capture_random_state()
    for _ in range(624):
        random.getrandbits(32)
    assert capture_random_state(before).python == read()
    assert len(reads) >= 6
