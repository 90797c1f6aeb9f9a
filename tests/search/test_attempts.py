"""Attempts in the process that holds the setup, and what their failures answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from autobatch import Probe, Progress
from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.rehearsal.attempt import Outcome
from autobatch.rehearsal.process import ChildCrashed, SetupProcess
from autobatch.search.attempts import run_attempt
from autobatch.search.probe import find_largest
from tests.support.sizes import BUDGET, machine_of

CRASHED = ChildCrashed("the child process ended (SIGSEGV)")
KILLED = ChildCrashed("the child process ended (SIGKILL)", out_of_memory=True)
LAUNCH = RuntimeError("CUDA error: invalid configuration argument")
ILLEGAL = RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors …")


class Child:
    """Answers each attempt by a function of its size: a limit of 990, and an error from some size on."""

    def __init__(self, error: Exception, first: int) -> None:
        machine = machine_of(lambda m: 9 * m + 100, lambda m: m)
        self.error, self.first, self.answer = error, first, machine.run

    def call(self, act: str, function: Callable[..., Any], size: int) -> Outcome:
        if size >= self.first:
            raise self.error
        return self.answer(size)


def found_in(child: Child) -> Probe:
    return find_largest(
        lambda size: run_attempt(cast(SetupProcess, child), size, Progress()),
        {"dataset": 10_000},
        lambda: CountingAllocator(BUDGET),
    ).probe


def test_a_search_continues_below_a_size_that_killed_its_child() -> None:
    found = found_in(Child(KILLED, 21))
    assert (found.micro_batch, found.upper_bound_by) == (20, "run")
    killed = {run.reason for run in found.attempts if not run.fits}
    assert killed == {"the host ran out of memory and ended the child process"}


@pytest.mark.parametrize("error", [LAUNCH, ILLEGAL, CRASHED])
def test_an_error_above_a_size_that_fits_bounds_the_search(error: Exception) -> None:
    found = found_in(Child(error, 500))
    assert (found.micro_batch, found.upper_bound_by) == (499, "error")
    failed = {run.micro_batch: run.reason for run in found.attempts if run.is_error}
    assert min(failed) == 500
    assert {*failed.values()} == {str(error).splitlines()[0]}
