"""Random generators: captured, restored and seeded."""

from __future__ import annotations

import random
from contextlib import suppress

import numpy as np
import torch

from autobatch.workload.rng import (
    capture_random_state,
    preserved_random_state,
    restore_random_state,
    seed_everything,
    seed_generators,
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
