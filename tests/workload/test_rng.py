"""Random generators: captured, restored and seeded."""

from __future__ import annotations

import random
from contextlib import suppress

import numpy as np
import pytest
import torch

from autobatch.workload.rng import (
    RandomState,
    capture_random_state,
    preserved_random_state,
    restore_random_state,
    seed_cpu,
    seed_everything,
)


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_all_generators_are_restored_at_the_end_of_the_block_after_an_error_too() -> None:
    plain = capture_random_state().plain()
    first = draws()
    restore_random_state(RandomState(**plain))
    with suppress(KeyError), preserved_random_state():
        assert draws() == first
        raise KeyError
    assert draws() == first


def test_seeds_are_those_of_torch_and_close_ones_give_unrelated_draws() -> None:
    torch.manual_seed(2**40 + 3)
    first = torch.rand(5)
    seed_everything(2**40 + 3)
    assert torch.equal(torch.rand(5), first)
    found = []
    for key in [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 0, -1)]:
        seed_cpu(*key)
        found.append(draws())
    assert all(len(set(column)) == len(found) for column in zip(*found, strict=True))


@pytest.mark.parametrize("normals", [0, 1, 2])
def test_a_state_after_an_earlier_one_is_that_of_a_fresh_read(normals: int) -> None:
    """Normal numbers come in pairs, and 312 draws of two words each move the place to where it was."""
    np.random.normal(size=normals)
    last = capture_random_state()
    for draws in (0, 0, 1, 1, 312):
        np.random.normal(size=min(draws, 1)) if draws < 2 else np.random.random(draws)
        last = capture_random_state(last)
        fresh = capture_random_state()
        assert repr(last) == repr(fresh)
        assert np.array_equal(last.numpy[1], fresh.numpy[1])
