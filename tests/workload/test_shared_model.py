"""Notes on models that a workload's function does not build."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

from torch import nn

from autobatch.workload.reference import shared_model_notes
from tests.support.training import make_workload

MODEL = nn.Linear(2, 2)


def notes_of(function) -> list[str]:
    workload = make_workload(model=function)
    return shared_model_notes(workload, workload.model())


def test_a_model_that_exists_already_is_named() -> None:
    model = nn.Linear(2, 2)
    holder = SimpleNamespace(net=model)
    assert "already (model)" in notes_of(lambda: model)[0]
    assert "already (holder.net)" in notes_of(lambda: holder.net)[0]
    assert "already (MODEL)" in notes_of(lambda: MODEL)[0]


def test_a_model_that_is_built_is_not() -> None:
    width = 3
    assert notes_of(lambda: nn.Linear(width, width)) == []
    assert notes_of(partial(nn.Linear, 2, 2)) == []
    assert (
        notes_of(type("Net", (nn.Linear,), {"__init__": lambda self: nn.Linear.__init__(self, 1, 1)})) == []
    )
