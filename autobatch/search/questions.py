"""Questions of a probe to the process that holds the setup, and what a crash of that process answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Concatenate, ParamSpec, TypeVar

from autobatch.core.errors import AutobatchError, DoesNotFitError
from autobatch.core.records import Attempt, Remedy
from autobatch.core.units import format_bytes
from autobatch.footprint.explain import explain
from autobatch.footprint.fit import Footprint
from autobatch.footprint.program import Program, TooLong, Untraceable
from autobatch.footprint.remedies import in_words
from autobatch.setup import trace as traced_setup
from autobatch.setup.attempt import Outcome, attempt_at
from autobatch.setup.child import ChildCrashed
from autobatch.setup.session import Session, SetupProcess

P = ParamSpec("P")
T = TypeVar("T")


def run_attempt(
    process: SetupProcess, micro_batch: int, max_size: float | None = None, *, in_one_order: bool = False
) -> Outcome:
    """Make one attempt, on samples of at most ``max_size`` if that is given, as `attempt_at` does.

    A child that the host killed for want of memory is an answer: the size does not fit.

    Raises:
        InputError: the workload raised.
        ChildCrashed: the child crashed or hung for another reason.
    """
    start = time.perf_counter()
    try:
        outcome = process.call(
            f"an attempt at a micro-batch of {micro_batch}",
            _run_attempt,
            micro_batch,
            max_size,
            in_one_order=in_one_order,
        )
    except ChildCrashed as crash:
        if not crash.out_of_memory:
            raise
    else:
        if outcome.is_context_lost:
            process.restart()
        return outcome
    process.restart()
    killed = Attempt(
        micro_batch=micro_batch,
        fits=False,
        peak_allocated_bytes=None,
        peak_reserved_bytes=None,
        seconds=time.perf_counter() - start,
        reason="the host ran out of memory and ended the child process",
    )
    return Outcome(killed, None)


def trace(process: SetupProcess) -> Footprint | str | None:
    """Trace the step. Return the reason if that would take too long, and None if it cannot be traced."""
    return ask_or_none(process, "tracing the step", _trace)


def trace_other_order(process: SetupProcess) -> Program | None:
    """Trace an attempt in the other order. Return None if it cannot be traced."""
    return ask_or_none(process, "tracing the step", _trace_other_order)


def traced_peak(process: SetupProcess, micro_batch: int) -> int | None:
    """Return the peak reserved bytes that a trace alone predicts on a GPU; None on other devices."""
    if process.info.compute_capability is None:
        return None
    return ask_or_none(process, "tracing the step", _traced_peak, micro_batch)


def others_bytes(process: SetupProcess) -> int | None:
    """Return the bytes that other processes hold on the GPU now; None if unknown."""
    if process.info.device.other_processes_bytes is None:
        return None
    return ask_or_none(process, "reading the GPU", _others_bytes)


def remedies(process: SetupProcess) -> list[Remedy]:
    """Return the changes that let a micro-batch fit that does not, as predicted."""
    return ask_or_none(process, "looking for remedies", _remedies) or []


def nothing_fits(
    attempts: list[Attempt], process: SetupProcess, step: Footprint | None, *, single_error: str | None = None
) -> DoesNotFitError:
    """Build the error that explains the memory of the smallest attempt and lists remedies.

    Args:
        attempts: every attempt.
        process: holds the setup.
        step: the traced step; None if it could not be traced.
        single_error: the error of a micro-batch of 1; None if that was out of memory too.
    """
    last = attempts[-1]
    parts = [
        f"a micro-batch of {last.micro_batch} does not fit in the budget of "
        f"{format_bytes(process.info.device.budget_bytes)}: {str(last.reason).removesuffix('.')}"
        + (f" (in the {last.phase})" if last.phase else "")
    ]
    largest = process.info.largest_sample
    if largest is not None and last.micro_batch == 1:
        index, size = largest
        parts.append(f"It is sample {index} of the training data, whose size of {size:g} is the largest")
    if step is not None:
        with suppress(Untraceable):
            parts.append(f"It takes {explain(step, last.micro_batch).text()}")
    if single_error:
        parts.append(f"A micro-batch of 1 cannot run: {single_error.removesuffix('.')}")
    # The memory of a loss over the whole batch depends on the target batch, not on the micro-batch.
    smaller = ", a smaller target batch" if last.phase == "loss" else ""
    shorter = ", samples cut shorter or left out" if largest is not None else ""
    parts.append(f"What helps: a larger --memory-budget{smaller}{shorter}{in_words(remedies(process))}")
    return DoesNotFitError(". ".join(parts))


def ask_or_none(
    process: SetupProcess,
    act: str,
    function: Callable[Concatenate[Session, P], T],
    *args: P.args,
    **more: P.kwargs,
) -> T | None:
    """Ask for what can be done without, and replace a child that crashes over it."""
    try:
        return process.call(act, function, *args, **more)
    except ChildCrashed:
        process.restart()
    except AutobatchError:
        pass
    return None


def _run_attempt(
    session: Session, micro_batch: int, max_size: float | None, *, in_one_order: bool
) -> Outcome:
    return attempt_at(session.setup, micro_batch, max_size, in_one_order=in_one_order)


def _trace(session: Session) -> Footprint | str | None:
    """Return the step, or the reason if its trace would take too long."""
    try:
        step = traced_setup.trace_footprint(session.setup, says_why=True)
    except TooLong as error:
        return str(error)
    return None if step is None else session.keep(step)


def _trace_other_order(session: Session) -> Program | None:
    return traced_setup.other_order(session.setup)


def _traced_peak(session: Session, micro_batch: int) -> int | None:
    return traced_setup.traced_peak(session.setup, micro_batch)


def _others_bytes(session: Session) -> int | None:
    return session.setup.device.describe().other_processes_bytes


def _remedies(session: Session) -> list[Remedy]:
    return traced_setup.remedies_of(session.setup, session.find(Footprint))
