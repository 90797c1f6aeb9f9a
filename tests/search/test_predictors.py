"""Probes of steps that follow no rule in the micro-batch, against every size."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from autobatch.search.find_limit import find_limit
from autobatch.search.one_probe import ProbeLimits
from autobatch.setup import trace as traced_setup
from autobatch.setup.attempt import attempt
from autobatch.setup.child import ThisProcess
from autobatch.setup.setup import SetupSettings, open_setup
from tests.support.packed import WORKLOADS, packed_in_forward
from tests.support.probes import Listener, Sequences, work

CASES = [
    ("packed by collate", "cpu", "100KiB"),
    ("packed by collate", "sim:t4", "4MiB"),
    ("packed in the model", "cpu", "60KiB"),
]


@pytest.mark.parametrize(("name", "device", "budget"), CASES)
def test_one_run_finds_the_limit_of_packed_sequences(
    name: str, device: str, budget: str, tmp_path: Path
) -> None:
    settings = SetupSettings(device=device, memory_budget=budget)
    setup = open_setup(WORKLOADS[name](samples=2000 if device != "cpu" else 120), settings)
    process = ThisProcess(setup)
    found = find_limit(process, ProbeLimits(), home=tmp_path, progress=Listener())
    size = found.probe.micro_batch
    assert found.is_rough
    assert [one.micro_batch for one in found.probe.attempts] == [size]
    assert found.probe.upper_bound_by == "replay"
    assert attempt(setup, size).attempt.fits
    assert not attempt(setup, size + 1).attempt.fits


def test_a_trace_that_knows_other_lengths_is_refuted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = open_setup(packed_in_forward(), SetupSettings(device="cpu", memory_budget="40KiB"))
    process = ThisProcess(setup)
    trace_single = traced_setup.trace_single

    def wrong(made, cap):
        # Each size has the trace of a smaller one.
        return {size + 3: trace for size, trace in trace_single(made, cap).items()}

    monkeypatch.setattr(traced_setup, "trace_single", wrong)
    found = find_limit(process, ProbeLimits(), home=tmp_path, progress=Listener()).probe
    assert len(found.attempts) > 1
    assert attempt(setup, found.micro_batch).attempt.fits
    assert not attempt(setup, found.micro_batch + 1).attempt.fits


class Unrolled(nn.Module):
    """A recurrent layer that the CPU runs step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.GRU(4, 4, batch_first=True)

    def forward(self, x):
        return self.body(x)[0]


def test_a_step_with_too_many_operators_is_run_in_place_of_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = work(
        Unrolled,
        train_data=Sequences([5] * 60, width=4),
        loss=lambda model, batch: model(batch[0]).square().mean(),
    )
    setup = open_setup(workload, SetupSettings(device="cpu", memory_budget="50KiB"))
    process = ThisProcess(setup)
    monkeypatch.setattr(traced_setup, "MOST_OPERATORS", 100)
    listener = Listener()
    found = find_limit(process, ProbeLimits(), home=tmp_path, progress=listener)
    assert found.footprint is None
    size = found.probe.micro_batch
    assert size < 60
    assert attempt(setup, size).attempt.fits
    assert not attempt(setup, size + 1).attempt.fits
    assert any("more than 100 operators" in line for line in listener.notes)
