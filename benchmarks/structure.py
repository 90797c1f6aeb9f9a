"""Figures of the structure of autobatch, read from its source with ``ast``.

    python -m benchmarks.structure [--json]

Nothing is imported from the package, so the figures describe exactly the files of the working tree.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CLAUSE_WORDS = frozenset({"what", "whether", "where", "how", "which", "who", "when", "why", "inside"})
"""First words of a docstring that opens with a clause instead of a verb or a noun."""
DEVICE_KINDS = frozenset({"cuda", "cpu", "sim"})
NO_LAYER = frozenset({"__init__.py", "__main__.py", "py.typed"})
LONG_FILE = 300
"""Lines above which a file counts as long."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Structure:
    """The figures of a source tree."""

    entries: list[str]
    """Packages and modules at the top."""
    docstrings: int
    clause_first: list[str]
    """Places of docstrings that open with a clause."""
    kind_comparisons: list[str]
    """Places outside of ``device/`` that compare the kind of a device."""
    options_checks: list[str]
    """Places that examine the class of the options, or an attribute that may be missing."""
    modules: int
    untested: list[str]
    """Modules without a test file of the same name."""
    longest_function: str
    longest_function_lines: int
    long_files: list[str]
    lines: int

    @property
    def clause_first_share(self) -> float:
        """Share of the docstrings that open with a clause."""
        return len(self.clause_first) / max(1, self.docstrings)

    @property
    def tested_share(self) -> float:
        """Share of the modules that have a test file of the same name."""
        return 1 - len(self.untested) / max(1, self.modules)


def read_structure(root: Path = ROOT) -> Structure:
    """Read the figures of ``autobatch/`` and ``tests/`` below a folder."""
    package = root / "autobatch"
    paths = sorted(package.rglob("*.py"))
    sources = {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in paths}
    trees = {name: ast.parse(source) for name, source in sources.items()}
    lengths = {name: len(source.splitlines()) for name, source in sources.items()}
    docstrings = [one for name, tree in trees.items() for one in _docstrings(name, tree)]
    functions = [
        (node.end_lineno - node.lineno + 1, f"{name}:{node.name}")
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, Function) and node.end_lineno is not None
    ]
    longest = max(functions, default=(0, ""))
    modules = [path for path in paths if path.name not in NO_LAYER]
    return Structure(
        entries=sorted(path.name for path in package.iterdir() if _is_entry(path)),
        docstrings=len(docstrings),
        clause_first=[place for place, text in docstrings if opens_with_clause(text)],
        kind_comparisons=[
            f"{name}:{node.lineno}"
            for name, tree in trees.items()
            if not name.startswith("autobatch/device/")
            for node in ast.walk(tree)
            if compares_device_kind(node)
        ],
        options_checks=[
            f"{name}:{node.lineno}"
            for name, tree in trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and checks_options(node)
        ],
        modules=len(modules),
        untested=[str(path.relative_to(root)) for path in modules if not expected_test(path, root).is_file()],
        longest_function=longest[1],
        longest_function_lines=longest[0],
        long_files=[name for name, count in lengths.items() if count > LONG_FILE],
        lines=sum(lengths.values()),
    )


def _is_entry(path: Path) -> bool:
    """Check that a path is a layer: a package, or a module at the top."""
    return path.name not in NO_LAYER and (path.suffix == ".py" or (path / "__init__.py").is_file())


def _docstrings(name: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of every docstring of a module, its classes and its functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function):
            text = ast.get_docstring(node)
            if text:
                yield f"{name}:{getattr(node, 'lineno', 1)}", text


def opens_with_clause(docstring: str) -> bool:
    """Check if the first word of a docstring opens a clause."""
    first = re.search(r"[A-Za-z]+", docstring)
    return first is not None and first[0].lower() in CLAUSE_WORDS


def compares_device_kind(node: ast.AST) -> bool:
    """Check if a node compares something called ``…kind`` with the kinds of devices."""
    if not isinstance(node, ast.Compare):
        return False
    operands = [node.left, *node.comparators]
    names = [one.attr if isinstance(one, ast.Attribute) else getattr(one, "id", "") for one in operands]
    constants = {part.value for one in operands for part in ast.walk(one) if isinstance(part, ast.Constant)}
    return any(name.endswith("kind") for name in names) and bool(constants & DEVICE_KINDS)


def checks_options(call: ast.Call) -> bool:
    """Check if a call is ``isinstance(options, …)`` or ``getattr(options, …)``."""
    if not (isinstance(call.func, ast.Name) and call.func.id in ("isinstance", "getattr") and call.args):
        return False
    first = call.args[0]
    return (first.attr if isinstance(first, ast.Attribute) else getattr(first, "id", "")) == "options"


def expected_test(module: Path, root: Path) -> Path:
    """Return the path of the test file of a module."""
    inside = module.relative_to(root / "autobatch")
    return root / "tests" / inside.parent / f"test_{inside.name}"


def report(found: Structure) -> str:
    """Return the figures as text, followed by the places behind them."""
    clauses, tested = len(found.clause_first), found.modules - len(found.untested)
    lines = [
        f"entries at the top       {len(found.entries)}: {' '.join(found.entries)}",
        f"clause-first docstrings  {found.clause_first_share:.1%} ({clauses} of {found.docstrings})",
        f"device kind compared     {len(found.kind_comparisons)} times outside device/",
        f"options examined         {len(found.options_checks)} times for their class or an attribute",
        f"modules with a test      {found.tested_share:.1%} ({tested} of {found.modules})",
        f"longest function         {found.longest_function_lines} lines: {found.longest_function}",
        f"files over {LONG_FILE} lines     {len(found.long_files)}: {' '.join(found.long_files)}",
        f"lines of autobatch/      {found.lines:,}",
    ]
    for title, places in (
        ("clause-first docstrings", found.clause_first),
        ("device kind compared", found.kind_comparisons),
        ("options examined", found.options_checks),
        ("modules without a test of the same name", found.untested),
    ):
        lines += ["", f"{title}:", *(f"  {place}" for place in places)] if places else []
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    found = read_structure()
    print(json.dumps(asdict(found)) if options.json else report(found))


if __name__ == "__main__":
    main()
