"""Attempts in the process that holds the setup, and what their failures answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from autobatch import Progress
from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.rehearsal.attempt import Outcome
from autobatch.rehearsal.process import ChildCrashed
from autobatch.search.attempts import run_attempt
from autobatch.search.probe import find_largest
from tests.support.probes import classify, probed, work
from tests.support.sizes import BUDGET, machine_of

CRASHED = ChildCrashed("the child process ended (SIGSEGV)")
KILLED = ChildCrashed("the child process ended (SIGKILL)", out_of_memory=True)
LAUNCH = RuntimeError("CUDA error: invalid configuration argument")
ILLEGAL = RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors …")


class Process:
    """Answers each attempt by a function of its size, and counts its restarts."""

    def __init__(self, run: Callable[[int], Outcome], *, is_replaceable: bool = True) -> None:
        self.answer = run
        self.is_replaceable = is_replaceable
        self.info: Any = None
        self.restarts = 0

    def call(self, act: str, function: Callable[..., Any], *arguments: Any) -> Any:
        return self.answer(*arguments)

    def restart(self) -> bool:
        self.restarts += 1
        return self.is_replaceable


def failing(error: Exception, first: int = 0) -> Callable[[int], Outcome]:
    """Return a machine with a limit of 990 whose sizes from the first on fail with an error."""
    machine = machine_of(lambda m: 9 * m + 100, lambda m: m)

    def run(size: int | None) -> Outcome:
        if size is None or size >= first:
            raise error
        return machine.run(size)

    return run


def found_in(process: Process) -> Any:
    return find_largest(
        lambda size: run_attempt(process, size, Progress()),
        cap=10_000,
        new_allocator=lambda: CountingAllocator(BUDGET),
    )


def test_a_search_continues_below_a_size_that_killed_its_child() -> None:
    process = Process(failing(KILLED, 21))
    found = found_in(process)
    assert (found.micro_batch, found.upper_bound_by) == (20, "run")
    killed = [one for one in found.attempts if not one.fits]
    assert process.restarts == len(killed) > 0
    assert {one.reason for one in killed} == {"the host ran out of memory and ended the child process"}


@pytest.mark.parametrize(("error", "restarts"), [(LAUNCH, False), (ILLEGAL, True), (CRASHED, True)])
def test_an_error_above_a_size_that_fits_bounds_the_search(error: Exception, restarts: bool) -> None:
    process = Process(failing(error, 500))
    found = found_in(process)
    assert (found.micro_batch, found.upper_bound_by, found.stopped_by) == (499, "error", None)
    failed = [one for one in found.attempts if one.is_error]
    assert failed[-1].micro_batch == min(one.micro_batch for one in failed) == 500
    assert {one.reason for one in failed} == {str(error).splitlines()[0]}
    assert process.restarts == (len(failed) if restarts else 0)


def test_memory_still_bounds_a_search_below_the_errors_and_an_error_before_any_size_fits_is_raised() -> None:
    found = found_in(Process(failing(LAUNCH, 2000)))
    assert (found.micro_batch, found.upper_bound_by) == (990, "replay")
    assert not any(one.is_error for one in found.attempts)
    with pytest.raises(RuntimeError, match="invalid configuration"):
        found_in(Process(failing(LAUNCH, 1)))


def test_a_process_without_a_child_stops_with_the_best_size_once_its_context_is_lost() -> None:
    process = Process(failing(ILLEGAL, 500), is_replaceable=False)
    found = found_in(process)
    assert (found.upper_bound_by, found.stopped_by) == (None, "lost GPU context")
    assert found.micro_batch == max(one.micro_batch for one in found.attempts if one.fits)


def limited(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    if len(batch[1]) > 77:
        raise LAUNCH
    return classify(model, batch)


def test_a_probe_names_the_error_and_keeps_its_answer() -> None:
    result, listener = probed(work(loss=limited), memory_budget="10MiB")
    probe = result.probe
    assert (probe.micro_batch, probe.upper_bound_by, probe.oom_count) == (77, "error", 0)
    assert any("invalid configuration argument" in one and "78" in one for one in listener.notes)
    again, _ = probed(work(loss=limited), memory_budget="10MiB")
    assert again.probe.micro_batch == 77
