"""The workloads of the clients' table: their names, and the row of one."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.support.libraries import installed


@pytest.fixture(scope="module", name="run")
def imported_when_needed() -> ModuleType:
    """Import the libraries here: that takes a third of the time of the collection of all tests."""
    installed("transformers")
    installed("peft")
    from benchmarks.clients import run

    return run


def test_names_are_unique_and_those_of_the_workloads(run: ModuleType):
    clients = dict(run.clients())
    assert len(clients) == len(list(run.clients())) > 40
    for name in ("MLP, NAdam", "T5", "DCGAN"):
        assert clients[name]().name == name


def test_a_missing_package_is_named_in_its_row(run: ModuleType):
    def build():
        raise ModuleNotFoundError("No module named 'timm'", name="timm")

    row = ["timm ViT", "cpu", "not run", "-", "-", "-", "timm is not installed", *"----"]
    assert run.row("timm ViT", build, "cpu") == row


@pytest.mark.slow
def test_a_row_has_runs_errors_and_the_evidence(run: ModuleType):
    name = "MLP, SGD"
    cells = run.row(name, dict(run.clients())[name], "cpu")
    assert cells[:2] == [name, "cpu"]
    assert cells[2] >= 48
    assert cells[4] >= 1
    assert cells[6] in ("run", "replay")
    assert cells[7] == "out of memory"
