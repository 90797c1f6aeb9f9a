"""Random generators: captured, restored and seeded."""

from __future__ import annotations

import random
from contextlib import suppress

import numpy as np
import pytest
import torch

from autobatch.workload.rng import (
    capture_random_state,
    plain_random_state,
    preserved_random_state,
    random_state_of,
    restore_random_state,
    seed_everything,
    seed_generators,
)


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_all_generators_are_restored_at_the_end_of_the_block_after_an_error_too() -> None:
    state = capture_random_state()
    first = draws()
    restore_random_state(random_state_of(plain_random_state(state)))
    with suppress(KeyError), preserved_random_state():
        assert draws() == first
        raise KeyError
    assert draws() == first


def test_torch_is_seeded_as_by_its_own_function_and_no_stack_traces_are_kept() -> None:
    torch.manual_seed(2**40 + 3)
    first = torch.rand(5)
    before = len(torch.cuda._queued_calls), len(torch.xpu._queued_calls)
    seed_everything(2**40 + 3)
    assert torch.equal(torch.rand(5), first)
    if not torch.cuda.is_available():
        assert (len(torch.cuda._queued_calls), len(torch.xpu._queued_calls)) == before


def test_seeds_that_differ_in_one_number_give_unrelated_draws() -> None:
    found = []
    for key in [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 0, -1)]:
        seed_generators(*key)
        found.append(draws())
    assert all(len(set(column)) == len(found) for column in zip(*found, strict=True))


@pytest.mark.parametrize("normals", [0, 1, 2])
def test_a_state_after_an_earlier_one_is_that_of_a_fresh_read(normals: int) -> None:
    """Normal numbers come in pairs, and 312 draws of two words each move the place to where it was."""
    np.random.normal(size=normals)
    last = capture_random_state()
    for draw in (
        lambda: None,
        lambda: None,
        np.random.normal,
        np.random.normal,
        np.random.random,
        lambda: np.random.random(312),
    ):
        draw()
        last = capture_random_state(last)
        assert repr(plain_random_state(last)) == repr(plain_random_state())
