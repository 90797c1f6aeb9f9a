"""The figures of the structure: how they are read, and the limits that the package keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.structure import Structure, read_structure

MOST_ENTRIES = 16
MOST_CLAUSE_FIRST = 0.01


@pytest.fixture(scope="module", name="found")
def read_once(tmp_path_factory: pytest.TempPathFactory) -> Structure:
    """Read the package alone, because the lines of tests and benchmarks take longer to count."""
    root = tmp_path_factory.mktemp("package")
    (root / "autobatch").symlink_to(Path(__file__).parents[1] / "autobatch")
    return read_structure(root)


def a_tree(root: Path, **modules: str) -> Structure:
    """Write a small package with these modules, and read its structure."""
    for name, source in {"__init__": "", **modules}.items():
        path = root / "autobatch" / f"{name.replace('__in__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return read_structure(root)


def test_the_package_has_few_entries(found: Structure) -> None:
    assert len(found.entries) <= MOST_ENTRIES, found.entries


def test_docstrings_open_with_a_verb_or_a_noun(found: Structure) -> None:
    assert found.clause_first_share < MOST_CLAUSE_FIRST, "\n".join(found.clause_first)


def test_no_layer_asks_a_device_for_its_kind_or_options_for_their_class(found: Structure) -> None:
    assert found.kind_comparisons == []
    assert found.options_checks == []


def test_long_functions_single_importers_and_carriers_are_named(tmp_path: Path) -> None:
    body = "\n".join("    x = 1" for _ in range(700))
    found = a_tree(
        tmp_path,
        layer__in____init__="",
        layer__in__plan="class Plan:\n    target_batch: int\n",
        layer__in__one="from autobatch.layer.plan import Plan\nif world > 1:\n    pass\n",
        layer__in__bare=f"def long(options: FitOptions):\n{body}\n",
    )
    assert (found.longest_function, found.longest_function_lines) == ("autobatch/layer/bare.py:long", 701)
    assert found.long_files == ["autobatch/layer/bare.py"]
    assert found.entries == ["layer"]
    assert found.one_importer == ["autobatch/layer/plan.py"]
    assert found.carriers == ["autobatch/layer/plan.py:Plan"]
    assert found.mode_branches == ["autobatch/layer/one.py:2"]
    assert found.option_takers == ["autobatch/layer/bare.py:long"]
