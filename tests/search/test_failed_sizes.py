"""Errors above a size that fits: bounds of a search, new children, and a process that cannot be replaced."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import Tensor, nn

import autobatch
from autobatch.core.errors import InputError
from autobatch.device.oom import loses_context
from autobatch.search.failed_sizes import LOST, FailedSizes
from autobatch.search.search import search
from autobatch.setup.attempt import Outcome
from autobatch.setup.child import ChildCrashed
from tests.support.probes import classify, probed, work
from tests.support.sizes import machine_of, replay_of

LAUNCH = RuntimeError("CUDA error: invalid configuration argument")
ILLEGAL = RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors …")


class Process:
    """Counts its restarts."""

    def __init__(self, *, is_replaceable: bool = True) -> None:
        self.is_replaceable = is_replaceable
        self.restarts = 0

    def restart(self) -> None:
        self.restarts += 1


def sizes_failing_from(first: int, error: Exception, process: Process) -> FailedSizes:
    machine = machine_of(lambda m: 9 * m + 100, lambda m: m)

    def run(size: int) -> Outcome:
        if size >= first:
            raise error
        return machine.run(size)

    return FailedSizes(run, process)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "restarts"),
    [(LAUNCH, False), (ILLEGAL, True), (ChildCrashed("the child ended (SIGSEGV)"), True)],
    ids=["launch", "illegal access", "crash"],
)
def test_an_error_above_a_size_that_fits_bounds_the_search(error: Exception, restarts: bool) -> None:
    process = Process()
    sizes = sizes_failing_from(500, error, process)
    found = search(sizes, cap=10_000, replay=replay_of(), stopped=lambda: sizes.stopped_by)
    assert (found.micro_batch, found.upper_bound_by, found.stopped_by) == (499, "error", None)
    failed = [one for one in found.attempts if one.is_error]
    assert failed[-1].micro_batch == min(one.micro_batch for one in failed) == 500
    assert {one.reason for one in failed} == {str(error).splitlines()[0]}
    assert process.restarts == (len(failed) if restarts else 0)


def test_memory_still_bounds_a_search_below_the_errors() -> None:
    sizes = sizes_failing_from(2000, LAUNCH, Process())
    found = search(sizes, cap=10_000, replay=replay_of())
    assert (found.micro_batch, found.upper_bound_by) == (990, "replay")
    assert not any(one.is_error for one in found.attempts)


def test_an_error_before_any_size_fits_is_raised() -> None:
    with pytest.raises(RuntimeError, match="invalid configuration"):
        search(sizes_failing_from(1, LAUNCH, Process()), cap=100, replay=replay_of())


def test_a_process_without_a_child_stops_with_the_best_size_once_its_context_is_lost() -> None:
    process = Process(is_replaceable=False)
    sizes = sizes_failing_from(500, ILLEGAL, process)
    found = search(sizes, cap=10_000, replay=replay_of(), stopped=lambda: sizes.stopped_by)
    assert (found.upper_bound_by, found.stopped_by, process.restarts) == (None, LOST, 0)
    assert found.micro_batch == max(one.micro_batch for one in found.attempts if one.fits)


def test_a_refusal_that_the_budget_did_not_cause_is_repeated_once() -> None:
    """The first failure is transient: the size fits. The second one stays, and is marked."""
    machine = machine_of(lambda m: 9 * m + 100, lambda m: m)
    refusals = {300: 1, 700: 9}

    def run(size: int) -> Outcome:
        outcome = machine.run(size)
        if refusals.get(size, 0):
            refusals[size] -= 1
            attempt = msgspec.structs.replace(outcome.attempt, fits=False, is_below_budget=True)
            return Outcome(attempt, None)
        return outcome

    sizes = FailedSizes(run, Process())  # type: ignore[arg-type]
    assert sizes(300).attempt.fits
    assert machine.asked == [300, 300]
    found = sizes(700).attempt
    assert (found.fits, found.is_below_budget) == (False, True)
    assert machine.asked == [300, 300, 700, 700]


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("the workload raised AcceleratorError: CUDA error: an illegal memory access was encountered", True),
        ("CUDA error: out of memory", True),
        ("CUDA error: invalid configuration argument", False),
        ("CUDA out of memory. Tried to allocate 2.00 GiB.", False),
    ],
)
def test_a_lost_context_is_told_by_its_text(text: str, lost: bool) -> None:
    assert loses_context(InputError(text)) is lost


def limited(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    if len(batch[1]) > 77:
        raise RuntimeError("CUDA error: invalid configuration argument")
    return classify(model, batch)


def test_a_probe_names_the_error_and_keeps_its_answer() -> None:
    result, listener = probed(work(loss=limited), memory_budget="10MiB")
    probe = result.probe
    assert (probe.micro_batch, probe.upper_bound_by, probe.oom_count) == (77, "error", 0)
    assert any("invalid configuration argument" in one and "78" in one for one in listener.notes)
    again, _ = probed(work(loss=limited), memory_budget="10MiB")
    assert again.probe.micro_batch == 77
    assert (
        autobatch.plan(work(loss=limited), target_batch=300, device="cpu", memory_budget="10MiB").micro_batch
        <= 77
    )
    assert torch.is_grad_enabled()
