"""Rules of the source: which layers import which, and who makes tensors."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import autobatch

pytestmark = pytest.mark.xdist_group("source")
"""One worker reads all files."""
PACKAGE = Path(autobatch.__file__).parent

LAYERS = [
    "core",
    "planning",
    "report",
    "device",
    "workload",
    "step",
    "distributed",
    "footprint",
    "rehearsal",
    "search",
    "estimates",
    "training",
    "tuning",
    "api",
    "integrations",
    "cli",
]
"""In import order. Imports inside functions and for type checkers count like all others."""
ONLY = {
    "pynvml": {"device.host"},
    "optuna": {"tuning"},
    "torch.distributed": {"distributed"},
    "torch": {*LAYERS} - {"core", "planning", "report"},
}
"""Libraries that few modules, or the modules of some layers, may import."""
MAKERS = {
    "arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand", "randint",
    "randn", "randperm", "tensor", "zeros",
}  # fmt: skip
"""Functions that make a tensor on the default device."""
DEVICE_KINDS = {"cuda", "cpu", "sim"}


@cache
def modules() -> dict[str, Path]:
    """Return every module below the root by its dotted name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name not in ("", "__main__"):
            found[name] = path
    return found


@cache
def nodes(module: str) -> list[ast.AST]:
    """Return what the source of a module consists of."""
    return list(ast.walk(ast.parse(modules()[module].read_text(encoding="utf-8"))))


@cache
def imports(module: str) -> set[str]:
    """Return the dotted names that a module imports, wherever the import stands."""
    found = set()
    for node in nodes(module):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own_imports(module: str) -> set[str]:
    """Return the modules of autobatch that a module imports."""
    known = modules()
    found = set()
    for target in imports(module):
        name = target.removeprefix("autobatch.")
        if target.startswith("autobatch."):
            parent = name.rpartition(".")[0]
            assert name in known or parent in known, f"{module} imports {target} from the root"
            found.add(name if name in known else parent)
    return found - {module}


def layer_of(module: str) -> int:
    """Return the place of a module's layer in the list."""
    return LAYERS.index(module.partition(".")[0])


def test_every_entry_at_the_top_is_a_layer_and_no_import_runs_upwards() -> None:
    for module in modules():
        own = layer_of(module)
        for target in own_imports(module):
            assert layer_of(target) <= own, f"{module} imports {target}, which is above it"


def test_no_imports_form_a_circle() -> None:
    graph = {module: own_imports(module) for module in modules()}
    assert {*TopologicalSorter(graph).static_order()} == {*graph}  # or it raises an error with the circle


@pytest.mark.parametrize("library", ONLY)
def test_some_libraries_are_imported_in_few_places(library: str) -> None:
    for module in modules():
        if module not in ONLY[library] and module.partition(".")[0] not in ONLY[library]:
            inside = [one for one in imports(module) if f"{one}.".startswith(f"{library}.")]
            assert not inside, f"{module} imports {inside}: only {', '.join(ONLY[library])} may"


def test_tensors_are_made_on_a_named_device() -> None:
    """Else they are on a GPU in a program with ``torch.set_default_device("cuda")``, where a draw fails."""
    found = [
        f"{module}:{node.lineno}"
        for module in modules()
        for node in nodes(module)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in MAKERS
        and ast.unparse(node.func.value) == "torch"
        and not any(keyword.arg == "device" for keyword in node.keywords)
    ]
    assert found == []


def test_no_layer_asks_a_device_for_its_kind() -> None:
    asking = [
        f"{module}:{node.lineno}"
        for module in modules()
        if not module.startswith("device")
        for node in nodes(module)
        if isinstance(node, ast.Compare)
        if any(ast.unparse(side).endswith("kind") for side in (node.left, *node.comparators))
        if DEVICE_KINDS & {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
    ]
    assert asking == []
