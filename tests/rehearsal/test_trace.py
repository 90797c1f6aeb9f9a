"""Traces of the setup that is probed, against attempts and estimates."""

from __future__ import annotations

import bisect

from torch import nn

from autobatch.core.options import Options
from autobatch.rehearsal.attempt import attempt
from autobatch.rehearsal.setup import Setup, open_setup
from autobatch.rehearsal.trace import other_order, trace_footprint
from tests.support.probes import mlp, work


def largest_that_runs(made: Setup, cap: int) -> int:
    """Bisect, because each attempt runs."""
    return bisect.bisect_left(range(1, cap), True, key=lambda size: not attempt(made, size).attempt.fits)


def test_the_traces_of_both_orders_are_the_events_of_an_attempt() -> None:
    made = open_setup(work(lambda: mlp(4096)), Options().with_values(device="sim:t4", memory_budget="4MiB"))
    first, second = trace_footprint(made), other_order(made)
    size = largest_that_runs(made, 40)
    ran = attempt(made, size)
    assert None not in (first, second, ran.trace, ran.other)
    assert first.program.at(size) == ran.trace.canonical()
    assert second.at(size) == ran.other.canonical()
    assert ran.trace.canonical() != ran.other.canonical()


def test_a_model_of_very_many_tensors_is_run_in_place_of_traced(monkeypatch) -> None:
    made = open_setup(work(mlp), Options().with_values(device="cpu", memory_budget="1GiB"))
    tensors = len(list(made.model.parameters()))
    monkeypatch.setattr("autobatch.rehearsal.trace.MOST_TRACED", tensors)
    assert trace_footprint(made) is not None
    monkeypatch.setattr("autobatch.rehearsal.trace.MOST_TRACED", tensors - 1)
    assert trace_footprint(made) is None


def test_of_like_layers_only_those_count_that_are_traced(monkeypatch) -> None:
    monkeypatch.setattr("autobatch.rehearsal.trace.MOST_TRACED", 12)
    made = open_setup(
        work(lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(40)))),
        Options().with_values(device="sim:t4", memory_budget="4MiB"),
    )
    step = trace_footprint(made)
    assert step is not None
    assert step.program.at(7) == attempt(made, 7).trace.canonical()
