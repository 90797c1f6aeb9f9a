"""The figures of the structure: how they are read, and the limits that the package keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.structure import Structure, read_structure

MOST_CLAUSE_FIRST = 0.01


@pytest.fixture(scope="module", name="found")
def read_once() -> Structure:
    return read_structure()


def test_docstrings_open_with_a_verb_or_a_noun(found: Structure) -> None:
    assert len(found.clause_first) < MOST_CLAUSE_FIRST * found.docstrings, "\n".join(found.clause_first)


def test_no_layer_asks_a_device_for_its_kind(found: Structure) -> None:
    assert found.kind_comparisons == []


def test_single_importers_carriers_and_branches_are_named(tmp_path: Path) -> None:
    modules = {
        "plan": "class Plan:\n    target_batch: int\n",
        "one": "from autobatch.layer.plan import Plan\nif world > 1:\n    pass\n",
        "taker": "def takes(options: FitOptions):\n    pass\n",
    }
    (tmp_path / "autobatch/layer").mkdir(parents=True)
    for name, source in modules.items():
        (tmp_path / f"autobatch/layer/{name}.py").write_text(source, encoding="utf-8")
    found = read_structure(tmp_path)
    assert found.one_importer == ["autobatch/layer/plan.py"]
    assert found.carriers == ["autobatch/layer/plan.py:Plan"]
    assert found.mode_branches == ["autobatch/layer/one.py:2"]
    assert found.option_takers == ["autobatch/layer/taker.py:takes"]
