"""Questions to the process that holds the setup, and the answers if that process crashes over them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from autobatch.core.errors import AutobatchError, DoesNotFitError, InputError
from autobatch.core.records import Attempt
from autobatch.core.units import KiB, MiB
from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.device.allocator.trace import replay
from autobatch.search import questions
from autobatch.search.replay import Replay
from autobatch.search.search import search
from autobatch.setup.attempt import Outcome, attempt, attempt_at
from autobatch.setup.child import ChildCrashed
from autobatch.setup.session import ThisProcess
from autobatch.setup.setup import new_allocator
from autobatch.setup.trace import traced_peak
from tests.support.hardware import CpuAsGpu
from tests.support.step_workloads import WORKLOADS, deep_transformer, setup


class Failing(ThisProcess):
    """A process whose every call fails with an error, and which counts its calls and restarts."""

    def __init__(self, error: Exception, *, is_gpu: bool = True) -> None:
        made = setup(WORKLOADS["perceptron"]())
        super().__init__(replace(made, device=CpuAsGpu(memory_budget=64 * MiB)) if is_gpu else made)
        shared = 100 * MiB if is_gpu else None
        device = msgspec.structs.replace(self.info.device, other_processes_bytes=shared)
        self.info = msgspec.structs.replace(self.info, device=device)
        self.error = error
        self.acts: list[str] = []
        self.restarts = 0

    def call(self, act: str, function: Callable[..., Any], *args: Any, **more: Any) -> Any:
        self.acts.append(act)
        raise self.error

    def restart(self) -> None:
        self.restarts += 1


CRASHED = ChildCrashed("the child process ended (SIGSEGV)")
KILLED = ChildCrashed("the child process ended (SIGKILL)", out_of_memory=True)
OPTIONAL: dict[str, tuple[Callable[[ThisProcess], Any], Any]] = {
    "trace": (questions.trace, None),
    "other order": (questions.trace_other_order, None),
    "traced peak": (lambda process: questions.traced_peak(process, 3), None),
    "other processes": (questions.others_bytes, None),
    "remedies": (questions.remedies, []),
}
"""Each question that a probe can do without, and its answer if there is none."""


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_child_whose_driver_ran_out_of_memory_is_replaced(
    monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    process = Failing(CRASHED)
    ran = Attempt(micro_batch=3, fits=False, peak_allocated_bytes=None, peak_reserved_bytes=None, seconds=0.0)
    outcome = Outcome(ran, None, is_context_lost=is_lost)
    monkeypatch.setattr(process, "call", lambda *_, **__: outcome)
    assert questions.run_attempt(process, 3) is outcome
    assert process.restarts == is_lost


@pytest.mark.parametrize("question", OPTIONAL)
@pytest.mark.parametrize("crash", [CRASHED, KILLED], ids=["crashed", "killed for memory"])
def test_a_crash_over_an_optional_question_is_no_answer_and_starts_a_new_child(
    question: str, crash: ChildCrashed
) -> None:
    ask, nothing = OPTIONAL[question]
    process = Failing(crash)
    assert ask(process) == nothing
    assert (len(process.acts), process.restarts) == (1, 1)


@pytest.mark.parametrize("question", OPTIONAL)
def test_an_error_over_an_optional_question_is_no_answer_from_the_same_child(question: str) -> None:
    ask, nothing = OPTIONAL[question]
    process = Failing(AutobatchError("it cannot be traced"))
    assert ask(process) == nothing
    assert (len(process.acts), process.restarts) == (1, 0)


@pytest.mark.parametrize("question", ["traced peak", "other processes"])
def test_questions_about_a_gpu_are_not_asked_on_the_host(question: str) -> None:
    process = Failing(CRASHED, is_gpu=False)
    assert OPTIONAL[question][0](process) is None
    assert not process.acts


def test_a_child_killed_for_memory_over_an_attempt_answers_that_the_size_does_not_fit() -> None:
    process = Failing(KILLED)
    found = questions.run_attempt(process, 7)
    assert (found.attempt.micro_batch, found.attempt.fits, found.trace) == (7, False, None)
    assert found.attempt.reason == "the host ran out of memory and ended the child process"
    assert process.restarts == 1
    assert "micro-batch of 7" in process.acts[0]


@pytest.mark.parametrize("error", [CRASHED, InputError("the workload's loss raised")])
def test_any_other_failure_of_an_attempt_is_raised(error: AutobatchError) -> None:
    process = Failing(error)
    with pytest.raises(type(error), match=re.escape(str(error))):
        questions.run_attempt(process, 7)
    assert process.restarts == 0


def test_a_search_continues_below_a_size_that_killed_its_child() -> None:
    """The oracle: every size above 20 kills the child."""

    class Killed(Failing):
        def call(
            self, act: str, function: Callable[..., Any], micro_batch: int, *args: Any, **more: Any
        ) -> Any:
            if micro_batch > 20:
                raise self.error
            return ThisProcess.call(self, act, function, micro_batch, *args, **more)

    process = Killed(KILLED, is_gpu=False)
    replay = Replay(lambda: new_allocator(process.info))
    found = search(lambda size: questions.run_attempt(process, size), cap=64, replay=replay)
    assert (found.micro_batch, found.upper_bound_by) == (20, "run")
    assert process.restarts == sum(not one.fits for one in found.attempts) > 0


def test_the_answers_are_those_of_the_setup() -> None:
    made = setup(deep_transformer(), budget=2 * MiB)
    process = ThisProcess(made)
    peak = attempt(made, 5).attempt.peak_allocated_bytes
    assert questions.run_attempt(process, 5).attempt.peak_allocated_bytes == peak
    small = questions.run_attempt(process, 5, max_size=1e9).attempt
    assert small.peak_allocated_bytes == attempt_at(made, 5, 1e9).attempt.peak_allocated_bytes
    step = questions.trace(process)
    assert step is not None
    assert replay(step.program.at(5), CountingAllocator()).peak_allocated_bytes == peak
    assert questions.traced_peak(process, 5) is None
    gpu = replace(made, device=CpuAsGpu(memory_budget=64 * MiB))
    assert questions.traced_peak(ThisProcess(gpu), 5) == traced_peak(gpu, 5)


def failed(**fields: Any) -> Attempt:
    figures = {"peak_allocated_bytes": None, "peak_reserved_bytes": None, "seconds": 0.0}
    return Attempt(**{"micro_batch": 1, "fits": False, "reason": "R.", **figures, **fields})


def test_the_error_of_a_probe_names_the_memory_and_remedies_in_one_line() -> None:
    process = ThisProcess(setup(deep_transformer(), budget=200 * KiB))
    tried = [questions.run_attempt(process, size).attempt for size in (2, 1)]
    text = str(questions.nothing_fits(tried, process, questions.trace(process)))
    assert text.startswith("a micro-batch of 1 does not fit in the budget of 200 KiB: ")
    for words in ("requested", "free", "in the ", "parameters", "larger --memory-budget"):
        assert words in text
    remedies = re.findall(r"a micro-batch of ([\d,]+) is predicted to fit", text)
    assert all(int(size.replace(",", "")) >= 1 for size in remedies)
    assert "\n" not in text
    assert ".." not in text


def test_the_error_of_a_probe_needs_neither_a_trace_nor_remedies() -> None:
    process = Failing(CRASHED)
    found = questions.nothing_fits([failed(phase="forward")], process, None)
    assert isinstance(found, DoesNotFitError)
    assert str(found) == (
        "a micro-batch of 1 does not fit in the budget of 64.0 MiB: R (in the forward). "
        "What helps: a larger --memory-budget"
    )
    assert process.restarts == 1


def test_the_error_of_a_probe_names_a_smaller_target_batch_if_the_loss_ran_out_of_memory() -> None:
    text = str(questions.nothing_fits([failed(phase="loss")], Failing(CRASHED), None))
    assert text.endswith("What helps: a larger --memory-budget, a smaller target batch")


def test_the_error_of_a_probe_names_why_a_single_sample_cannot_run() -> None:
    process = Failing(CRASHED)
    text = str(questions.nothing_fits([failed(micro_batch=2)], process, None, single_error="ValueError: one"))
    assert text.startswith(
        "a micro-batch of 2 does not fit in the budget of 64.0 MiB: R. A micro-batch of 1 "
    )
    assert "cannot run: ValueError: one. What helps" in text
