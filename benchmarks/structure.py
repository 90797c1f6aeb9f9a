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
from collections.abc import Iterator
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
MODES = re.compile(r"\b(world|world_size|shard\w*|sharing|is_shared|parallel|is_stream|streams?|layout)\b")
"""Names of the modes in which several ranks, shared models and streams run."""
WHOLE_BATCH = re.compile(r"\b(WholeBatchLoss|whole_batch\w*|is_whole_batch)\b")
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
    trees: dict[str, TreeSize]
    """Size of the package, of its tests and of the benchmarks."""
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
    lines: int

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
    lengths = {name: len(source.splitlines()) for name, source in sources.items()}
    docstrings = [one for name, tree in trees.items() for one in _docstrings(name, tree)]
    functions = [
        (node.end_lineno - node.lineno + 1, f"{name}:{node.name}")
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, Function) and node.end_lineno is not None
    ]
    longest = max(functions, default=(0, ""))
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
        trees={tree: _tree_size(root / tree) for tree in TREES},
        internal_names=sorted(_internal_names(root / "tests")),
        one_importer=_imported_once(trees),
        carriers=[place for name, tree in trees.items() for place in _carriers(name, tree)],
        mode_branches=[place for name, tree in trees.items() for place in _mode_branches(name, tree)],
        option_takers=[place for name, tree in trees.items() for place in _option_takers(name, tree)],
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
    return TreeSize(
        len(sources),
        sum(len(source.splitlines()) for source in sources),
        sum(code_lines(source) for source in sources),
    )


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


def _carriers(name: str, tree: ast.Module) -> Iterator[str]:
    """Yield the classes with a field ``target_batch``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            declared = [one.target for one in node.body if isinstance(one, ast.AnnAssign)]
            fields = [target.id for target in declared if isinstance(target, ast.Name)]
            if "target_batch" in fields:
                yield f"{name}:{node.name}"


def _mode_branches(name: str, tree: ast.Module) -> Iterator[str]:
    """Yield the places that branch on ranks, shared models, streams or losses of a whole batch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            condition = ast.unparse(node.test)
            if MODES.search(condition) or WHOLE_BATCH.search(condition):
                yield f"{name}:{node.lineno}"


def _option_takers(name: str, tree: ast.Module) -> Iterator[str]:
    """Yield the functions with a parameter whose type is called ``…Options`` or ``…Settings``."""
    for node in ast.walk(tree):
        if isinstance(node, Function):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            types = [ast.unparse(one.annotation) for one in arguments if one.annotation is not None]
            if any(re.search(r"(Options|Settings|Limits)\b", one) for one in types):
                yield f"{name}:{node.name}"


def report(found: Structure) -> str:
    """Return the figures as text, followed by the places behind them."""
    clauses = len(found.clause_first)
    option_files = len({place.partition(":")[0] for place in found.option_takers})
    lines = [
        *(
            f"{tree + '/':<25}{size.lines:,} lines, {size.code_lines:,} of code, in {size.files} files"
            for tree, size in found.trees.items()
        ),
        f"entries at the top       {len(found.entries)}: {' '.join(found.entries)}",
        f"clause-first docstrings  {found.clause_first_share:.1%} ({clauses} of {found.docstrings})",
        f"device kind compared     {len(found.kind_comparisons)} times outside device/",
        f"options examined         {len(found.options_checks)} times for their class or an attribute",
        f"imported once            {len(found.one_importer)} modules",
        f"internal names in tests  {len(found.internal_names)}",
        f"takers of options        {len(found.option_takers)} functions in {option_files} files",
        f"fields target_batch      {len(found.carriers)}: {' '.join(found.carriers)}",
        f"branches on modes        {len(found.mode_branches)}",
        f"longest function         {found.longest_function_lines} lines: {found.longest_function}",
        f"files over {LONG_FILE} lines     {len(found.long_files)}: {' '.join(found.long_files)}",
    ]
    for title, places in (
        ("clause-first docstrings", found.clause_first),
        ("device kind compared", found.kind_comparisons),
        ("options examined", found.options_checks),
        ("modules that one other imports", found.one_importer),
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
