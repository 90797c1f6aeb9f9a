"""Rules of the source: how docstrings open, and who may ask for the kind of a device."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "autobatch"
CLAUSE_WORDS = frozenset({"what", "whether", "where", "how", "which", "who", "when", "why", "inside"})
DEVICE_KINDS = frozenset({"cuda", "cpu", "sim"})


def nodes() -> Iterator[tuple[Path, ast.AST]]:
    """Yield the nodes of every file of the package."""
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            yield path.relative_to(ROOT), node


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    opened = {
        (str(path), getattr(node, "name", "module")): text.split()[0].strip("`,.:").lower()
        for path, node in nodes()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if (text := ast.get_docstring(node))
    }
    assert len(opened) > 100
    assert {place: word for place, word in opened.items() if word in CLAUSE_WORDS} == {}


def test_no_layer_asks_a_device_for_its_kind() -> None:
    asking = [
        f"{path}:{node.lineno}"
        for path, node in nodes()
        if isinstance(node, ast.Compare) and path.parts[0] != "device"
        if any(ast.unparse(side).endswith("kind") for side in (node.left, *node.comparators))
        if DEVICE_KINDS & {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
    ]
    assert asking == []
