"""The figures of the structure: how they are read, and the limits that the package keeps."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.structure import Structure, code_lines, opens_with_clause, read_structure, report

ROOT = Path(__file__).parents[1]
MOST_ENTRIES = 16
MOST_CLAUSE_FIRST = 0.01


@pytest.fixture(scope="module", name="found")
def read_once() -> Structure:
    return read_structure()


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


def test_the_figures_agree_with_a_plain_count(found: Structure) -> None:
    files = sorted((ROOT / "autobatch").rglob("*.py"))
    assert found.lines == sum(path.read_bytes().count(b"\n") for path in files)
    sources = [path.read_text(encoding="utf-8") for path in files]
    assert found.docstrings == sum(
        bool(ast.get_docstring(node))
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    )


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        ("What it does.", True),
        ("``where`` it stands.", True),
        ("Inside, nothing is counted.", True),
        ("Return what it does.", False),
        ("Whatever fits.", False),
        ("", False),
    ],
)
def test_clauses_are_recognised_by_their_first_word(docstring: str, expected: bool) -> None:
    assert opens_with_clause(docstring) == expected


def test_comparisons_of_the_device_kind_count_outside_device_only(tmp_path: Path) -> None:
    source = (
        "a = device.kind == 'cuda'\n"
        "b = device_kind in ('cpu', 'sim')\n"
        "c = kind == 'activations'\n"
        "d = name == 'cuda'\n"
    )
    found = a_tree(tmp_path, one=source, device__in__two=source)
    assert found.kind_comparisons == ["autobatch/one.py:1", "autobatch/one.py:2"]


def test_questions_to_the_options_count(tmp_path: Path) -> None:
    source = (
        "a = isinstance(options, int)\nb = getattr(self.options, 'ema', None)\n"
        "c = getattr(other, 'ema')\nd = options.ema\n"
    )
    assert a_tree(tmp_path, one=source).options_checks == ["autobatch/one.py:1", "autobatch/one.py:2"]


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


def test_names_below_the_root_that_tests_import_count(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_one.py").write_text(
        "import autobatch\nfrom autobatch import fit\nfrom autobatch.core.units import MiB, GiB\n",
        encoding="utf-8",
    )
    assert a_tree(tmp_path).internal_names == ["autobatch.core.units.GiB", "autobatch.core.units.MiB"]


def test_code_lines_hold_no_comments_docstrings_or_blanks() -> None:
    source = (
        '"""A module.\n\nMore.\n"""\n\n# A comment.\nx = (\n    1,  # one\n)\ny = """text\nof a string"""\n'
    )
    assert code_lines(source) == 5


@pytest.mark.program
def test_the_command_prints_the_same_figures(found: Structure) -> None:
    command = [sys.executable, "-m", "benchmarks.structure"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == report(found)
    done = subprocess.run([*command, "--json"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["entries"] == found.entries
