"""Figures of the structure of autobatch, read from its source with ``ast``.

    python -m benchmarks.structure [--json]

Nothing is imported from the package, so the figures describe exactly the files of the working tree.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import tokenize
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CLAUSE_WORDS = frozenset({"what", "whether", "where", "how", "which", "who", "when", "why", "inside"})
"""First words of a docstring that opens with a clause instead of a verb or a noun."""
DEVICE_KINDS = frozenset({"cuda", "cpu", "sim"})
NO_LAYER = frozenset({"__init__.py", "__main__.py", "py.typed"})
LONG_FILE = 600
"""Lines above which a file counts as long."""
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


@dataclass(frozen=True)
class TreeSize:
    """Size of one source tree. Code lines hold neither comments, docstrings nor blanks alone."""

    files: int
    lines: int
    code_lines: int


@dataclass(frozen=True)
class Structure:
    """The figures of a source tree. Places are a file with a line or a name."""

    entries: list[str]
    """Packages and modules at the top."""
    trees: dict[str, TreeSize]
    """Size of the package, of its tests and of the benchmarks."""
    docstrings: int
    clause_first: list[str]
    """Docstrings that open with a clause."""
    kind_comparisons: list[str]
    """Comparisons of the kind of a device outside of ``device/``."""
    options_checks: list[str]
    """Examinations of the class of the options, or of an attribute that may be missing."""
    internal_names: list[str]
    """Names that tests import from below the root of the package."""
    one_importer: list[str]
    """Modules that exactly one other module imports."""
    carriers: list[str]
    """Structures with a field ``target_batch``."""
    mode_branches: list[str]
    """Branches on ranks, shared models, streams and losses of a whole batch."""
    option_takers: list[str]
    """Functions with a parameter that is an options or settings structure."""
    longest_function: str
    longest_function_lines: int
    long_files: list[str]

    @property
    def clause_first_share(self) -> float:
        """Share of the docstrings that open with a clause."""
        return len(self.clause_first) / max(1, self.docstrings)


def read_structure(root: Path = ROOT) -> Structure:
    """Read the figures of ``autobatch/`` and ``tests/`` below a folder."""
    package = root / "autobatch"
    paths = sorted(package.rglob("*.py"))
    sources = {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in paths}
    trees = {name: ast.parse(source) for name, source in sources.items()}
    nodes = [(name, node) for name, tree in trees.items() for node in ast.walk(tree)]

    def lines_where(holds: Callable[[ast.AST], bool], without: str = "-") -> list[str]:
        return [
            f"{name}:{getattr(node, 'lineno', 1)}"
            for name, node in nodes
            if not name.startswith(without) and holds(node)
        ]

    def names_where(holds: Callable[[ast.AST], bool]) -> list[str]:
        return [f"{name}:{node.name}" for name, node in nodes if holds(node)]  # type: ignore[attr-defined]

    functions = [(node, f"{name}:{node.name}") for name, node in nodes if isinstance(node, Function)]
    lengths = [((node.end_lineno or node.lineno) - node.lineno + 1, name) for node, name in functions]
    longest = max(lengths, default=(0, ""))
    return Structure(
        entries=sorted(path.name for path in package.iterdir() if _is_entry(path)),
        trees={tree: _tree_size(root / tree) for tree in TREES},
        docstrings=sum(bool(_docstring(node)) for _, node in nodes),
        clause_first=lines_where(_opens_with_clause),
        kind_comparisons=lines_where(_compares_device_kind, without="autobatch/device/"),
        options_checks=lines_where(_checks_options),
        internal_names=sorted(_internal_names(root / "tests")),
        one_importer=_imported_once(trees),
        carriers=names_where(_has_target_batch),
        mode_branches=lines_where(_branches_on_mode),
        option_takers=names_where(_takes_options),
        longest_function=longest[1],
        longest_function_lines=longest[0],
        long_files=[name for name, source in sources.items() if len(source.splitlines()) > LONG_FILE],
    )


def _is_entry(path: Path) -> bool:
    """Check that a path is a layer: a package, or a module at the top."""
    return path.name not in NO_LAYER and (path.suffix == ".py" or (path / "__init__.py").is_file())


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


def _checks_options(node: ast.AST) -> bool:
    """Check if a node is ``isinstance(options, …)`` or ``getattr(options, …)``."""
    return (
        isinstance(node, ast.Call)
        and _called(node.func) in ("isinstance", "getattr")
        and bool(node.args)
        and _called(node.args[0]) == "options"
    )


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


def _tree_size(folder: Path) -> TreeSize:
    sources = [path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))]
    lines = sum(len(source.splitlines()) for source in sources)
    return TreeSize(len(sources), lines, sum(map(code_lines, sources)))


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


def report(found: Structure) -> str:
    """Return the figures as text, followed by the places behind them."""
    option_files = len({place.partition(":")[0] for place in found.option_takers})
    clauses = f"{len(found.clause_first)} of {found.docstrings}"
    figures = {
        "entries at the top": f"{len(found.entries)}: {' '.join(found.entries)}",
        "clause-first docstrings": f"{found.clause_first_share:.1%} ({clauses})",
        "device kind compared": f"{len(found.kind_comparisons)} times outside device/",
        "options examined": f"{len(found.options_checks)} times for their class or an attribute",
        "imported once": f"{len(found.one_importer)} modules",
        "internal names in tests": f"{len(found.internal_names)}",
        "takers of options": f"{len(found.option_takers)} functions in {option_files} files",
        "fields target_batch": f"{len(found.carriers)}: {' '.join(found.carriers)}",
        "branches on modes": f"{len(found.mode_branches)}",
        "longest function": f"{found.longest_function_lines} lines: {found.longest_function}",
        f"files over {LONG_FILE} lines": f"{len(found.long_files)}: {' '.join(found.long_files)}",
    }
    places = {
        "clause-first docstrings": found.clause_first,
        "device kind compared": found.kind_comparisons,
        "options examined": found.options_checks,
        "modules that one other imports": found.one_importer,
    }
    lines = [
        f"{tree + '/':<25}{size.lines:,} lines, {size.code_lines:,} of code, in {size.files} files"
        for tree, size in found.trees.items()
    ]
    lines += [f"{label:<25}{text}" for label, text in figures.items()]
    for title, found_at in places.items():
        lines += ["", f"{title}:", *(f"  {place}" for place in found_at)] if found_at else []
    return "\n".join(lines)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    found = read_structure()
    print(json.dumps(asdict(found)) if options.json else report(found))


if __name__ == "__main__":
    main()
