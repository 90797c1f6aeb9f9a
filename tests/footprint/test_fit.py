"""Traces that share a process, with user code that keeps what it builds."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from autobatch import InputError
from autobatch.footprint.fit import SIZES, Unpredictable, footprint, footprint_beside, record_apart
from autobatch.footprint.tracing import apart
from autobatch.footprint.tracing.apart import run_in_copies
from tests.support.step_workloads import make, setting, setup


@pytest.fixture(autouse=True)
def copies() -> None:
    """Run calls in copies, as a run does."""


@cache
def window() -> Tensor:
    return torch.ones(16)


class Windowed(nn.Module):
    """A model whose first forward pass builds a tensor for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * window())


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.usefixtures("real_copies")
def test_functions_in_few_copies_answer_in_their_order(cores, monkeypatch):
    monkeypatch.setattr(apart, "usable_cores", lambda: cores)
    assert run_in_copies([lambda n=n: n * n for n in range(300)]) == [n * n for n in range(300)]


@pytest.mark.usefixtures("real_copies")
def test_a_function_that_fails_beside_others_is_called_again_alone(monkeypatch):
    monkeypatch.setattr(apart, "usable_cores", lambda: 2)

    def alone() -> int:
        if multiprocessing.current_process().daemon:
            raise LookupError("what another function has left is in the way")
        return os.getpid()

    shared, first, second = run_in_copies([os.getpid, alone, alone])
    assert len({os.getpid(), shared, first, second}) == 4

    def fails() -> int:
        raise InputError("asked 3, found 2")

    with pytest.raises(InputError, match="asked 3"):
        run_in_copies([os.getpid, fails])


@pytest.mark.usefixtures("real_copies")
def test_what_user_code_keeps_is_in_each_trace():
    data = [(torch.ones(16), torch.zeros(1))] * 20
    workload = make(Windowed, data=data, loss=lambda model, batch: model(batch[0]).square().mean())
    asked = replace(setting(setup(workload), capability=None), steps=(1,))
    step, (other,) = footprint_beside(asked, [(asked, 4)])
    alone, checked = record_apart((asked, SIZES[0]), (asked, 7))
    assert step.program.at(SIZES[0]).canonical() == alone.trace
    assert step.program.at(4).canonical() == other.trace
    assert step.program.at(7).canonical() == checked.trace
    assert window().sum() == 16, "nothing fake is left in this process"


def test_a_step_that_needs_values_is_refused():
    data = [(torch.ones(16), torch.zeros(1))] * 20
    workload = make(Windowed, data=data, loss=lambda model, batch: model(batch[0]).numpy().sum())
    with pytest.raises(Unpredictable, match="cannot predict"):
        footprint(setting(setup(workload), capability=None))
