"""Figures of the structure of autobatch, read from its source: ``python -m benchmarks.structure``.

Nothing is imported from the package, so the figures describe exactly the files of the working tree.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import arguments

ROOT = Path(__file__).parents[1]
CLAUSE_WORDS = frozenset({"what", "whether", "where", "how", "which", "who", "when", "why", "inside"})
"""First words of a docstring that opens with a clause instead of a verb or a noun."""
DEVICE_KINDS = frozenset({"cuda", "cpu", "sim"})
TREES = ("autobatch", "tests", "benchmarks")
MODES = re.compile(
    r"\b(world|world_size|shard\w*|sharing|is_shared|parallel|is_stream|streams?|layout"
    r"|WholeBatchLoss|whole_batch\w*|is_whole_batch)\b"
)
"""Names of the modes in which several ranks, shared models, streams and losses of a whole batch run."""
NO_CODE = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Structure(NamedTuple):
    """The places of the package that a rule or a goal is about: a file with a line or a name."""

    clause_first: list[str]
    """Docstrings that open with a clause."""
    docstrings: int
    kind_comparisons: list[str]
    """Comparisons of the kind of a device outside of ``device/``."""
    one_importer: list[str]
    """Modules that exactly one other module imports."""
    carriers: list[str]
    """Structures with a field ``target_batch``."""
    mode_branches: list[str]
    """Branches on ranks, shared models, streams and losses of a whole batch."""
    option_takers: list[str]
    """Functions with a parameter that is an options or settings structure."""


def read_structure(root: Path = ROOT) -> Structure:
    """Read the figures of ``autobatch/`` below a folder."""
    paths = sorted((root / "autobatch").rglob("*.py"))
    trees = {str(path.relative_to(root)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    nodes = [(name, node) for name, tree in trees.items() for node in ast.walk(tree)]

    def places(holds: Callable[[ast.AST], bool]) -> list[str]:
        found = [(name, node) for name, node in nodes if holds(node)]
        return [f"{name}:{getattr(node, 'name', None) or getattr(node, 'lineno', 1)}" for name, node in found]

    comparisons = places(_compares_device_kind)
    return Structure(
        clause_first=places(_opens_with_clause),
        docstrings=sum(bool(_docstring(node)) for _, node in nodes),
        kind_comparisons=[one for one in comparisons if not one.startswith("autobatch/device/")],
        one_importer=_imported_once(trees),
        carriers=places(_has_target_batch),
        mode_branches=places(_branches_on_mode),
        option_takers=places(_takes_options),
    )


def _docstring(node: ast.AST) -> str:
    has_one = isinstance(node, ast.Module | ast.ClassDef | Function)
    return (ast.get_docstring(node) or "") if has_one else ""


def _opens_with_clause(node: ast.AST) -> bool:
    first = re.search(r"[A-Za-z]+", _docstring(node))
    return first is not None and first[0].lower() in CLAUSE_WORDS


def _called(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _compares_device_kind(node: ast.AST) -> bool:
    """Check if a node compares something called ``…kind`` with the kinds of devices."""
    if not isinstance(node, ast.Compare):
        return False
    operands = [node.left, *node.comparators]
    constants = {part.value for one in operands for part in ast.walk(one) if isinstance(part, ast.Constant)}
    return any(_called(one).endswith("kind") for one in operands) and bool(constants & DEVICE_KINDS)


def _has_target_batch(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and any(
        isinstance(one, ast.AnnAssign) and _called(one.target) == "target_batch" for one in node.body
    )


def _branches_on_mode(node: ast.AST) -> bool:
    return isinstance(node, ast.If | ast.IfExp | ast.While) and bool(MODES.search(ast.unparse(node.test)))


def _takes_options(node: ast.AST) -> bool:
    """Check if a node is a function with a parameter whose type is called ``…Options`` or ``…Settings``."""
    if not isinstance(node, Function):
        return False
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    types = [ast.unparse(one.annotation) for one in arguments if one.annotation is not None]
    return any(re.search(r"(Options|Settings|Limits)\b", one) for one in types)


def code_lines(source: str) -> int:
    """Count the lines that hold code: no comment, docstring or blank alone."""
    docstrings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE and token.string:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def _size(folder: Path) -> str:
    """Return the lines of a tree in words."""
    sources = [path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))]
    lines = sum(len(source.splitlines()) for source in sources)
    return f"{lines:,} lines, {sum(map(code_lines, sources)):,} of code, in {len(sources)} files"


def _internal_names(tests: Path) -> set[str]:
    """Return the names that tests import from modules below the root of the package."""
    return {
        f"{node.module}.{alias.name}"
        for path in tests.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("autobatch.")
        for alias in node.names
    }


def _imported_once(trees: dict[str, ast.Module]) -> list[str]:
    """Return the modules that exactly one other module of the package imports."""
    modules = {name.removesuffix(".py").replace("/", "."): name for name in trees}
    importers: Counter[str] = Counter()
    for tree in trees.values():
        found = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        importers.update(found & modules.keys())
    return [modules[module] for module in sorted(importers) if importers[module] == 1]


def report(found: Structure, root: Path = ROOT) -> str:
    """Return the figures as text, followed by the places behind some of them."""
    option_files = len({place.partition(":")[0] for place in found.option_takers})
    figures = {
        **{f"{tree}/": _size(root / tree) for tree in TREES},
        "clause-first docstrings": f"{len(found.clause_first)} of {found.docstrings}",
        "device kind compared": f"{len(found.kind_comparisons)} times outside device/",
        "imported once": f"{len(found.one_importer)} modules",
        "internal names in tests": f"{len(_internal_names(root / 'tests'))}",
        "takers of options": f"{len(found.option_takers)} functions in {option_files} files",
        "fields target_batch": f"{len(found.carriers)}: {' '.join(found.carriers)}",
        "branches on modes": f"{len(found.mode_branches)}",
    }
    lines = [f"{label:<25}{text}" for label, text in figures.items()]
    for name in ("clause_first", "kind_comparisons", "one_importer"):
        lines += ["", f"{name}:", *(f"  {place}" for place in getattr(found, name))]
    return "\n".join(lines)


def main() -> None:
    """Print the figures."""
    arguments(__doc__)
    print(report(read_structure()))


if __name__ == "__main__":
    main()
