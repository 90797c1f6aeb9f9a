"""The workloads of the clients' table: their names, and the row of one."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

from benchmarks.clients.models import Client, clients
from benchmarks.clients.run import row


def test_names_are_unique_and_those_of_the_workloads():
    names = [client.name for client in clients()]
    assert len(set(names)) == len(names) > 40
    some = {client.name: client for client in clients() if client.name in ("MLP, NAdam", "T5", "GAN")}
    assert {name: client.build().name for name, client in some.items()} == {name: name for name in some}


def test_a_missing_package_is_named_in_its_row():
    def build():
        raise ModuleNotFoundError("No module named 'timm'", name="timm")

    assert row(Client("timm ViT", build), "cpu") == (
        "| timm ViT | cpu | not run | - | - | - | timm is not installed |"
    )


@pytest.mark.slow
def test_a_row_has_runs_errors_and_the_evidence():
    [client] = [one for one in clients() if one.name == "MLP, SGD"]
    cells = [cell.strip() for cell in row(client, "cpu").strip("| ").split("|")]
    assert cells[:2] == ["MLP, SGD", "cpu"]
    assert int(cells[2]) >= 48
    assert int(cells[4]) >= 1
    assert cells[6] in ("run", "replay")
