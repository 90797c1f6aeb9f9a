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
    clients = run.clients()
    names = [client.name for client in clients]
    assert len(set(names)) == len(names) > 40
    some = {client.name: client for client in clients if client.name in ("MLP, NAdam", "T5", "GAN")}
    assert {name: client.build().name for name, client in some.items()} == {name: name for name in some}


def test_a_missing_package_is_named_in_its_row(run: ModuleType):
    def build():
        raise ModuleNotFoundError("No module named 'timm'", name="timm")

    assert run.row(run.Client("timm ViT", build), "cpu") == (
        "| timm ViT | cpu | not run | - | - | - | timm is not installed | - |"
    )


@pytest.mark.slow
def test_a_row_has_runs_errors_and_the_evidence(run: ModuleType):
    [client] = [one for one in run.clients() if one.name == "MLP, SGD"]
    cells = [cell.strip() for cell in run.row(client, "cpu").strip("| ").split("|")]
    assert cells[:2] == ["MLP, SGD", "cpu"]
    assert int(cells[2]) >= 48
    assert int(cells[4]) >= 1
    assert cells[6] in ("run", "replay")
    assert cells[7] == "out of memory"
