"""The house has floors: a room imports only rooms below it. Read from the imports themselves."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import autobatch

PACKAGE = Path(autobatch.__file__).parent

FLOORS = [
    {"errors"},
    {"units", "files", "outlet"},
    {"records"},
    {"workload", "planning", "card", "knobs", "progress"},
    {"report"},
    {"hardware", "config", "finding", "failures", "results", "demo"},
    {"fits", "sources"},
    {"batches", "state", "gradients", "averaging"},
    {"applying", "caching"},
    {"trainee"},
    {"step"},
    {"samples", "training.windows", "training.signals"},
    # What is allocated, as events: the devices record it, the predictions make it.
    {"footprint.budget", "footprint.blocks", "footprint.foresee"},
    {"footprint.allocator", "footprint.trace"},
    {"footprint.program", "footprint.storages"},
    {"footprint.watching"},
    {"device.base", "device.host", "device.nvml", "device.oom"},
    # What joins micro-batches, for the trials as for the training.
    {"training.feed", "training.workers", "training.feeding"},
    {"device.history", "device.tracker"},
    {"device.cpu", "device.cuda", "device.simulated"},
    {"attempt"},
    {"footprint"},
    {"forecast", "bench"},
    {"search", "prior", "estimating"},
    {"isolation"},
    {"probers"},
    {"probing"},
    {"tuning.measurement", "tuning.worker", "training.windows"},
    {"tuning"},
    {"training"},
    {"stages"},
    {"rating"},
    {"fitting"},
    {"pipeline", "integrations"},
    {"commands", "arguments"},
    {"cli"},
    {"__main__"},
]
"""From the ground up. A package stands where its name does; modules needed further down are named."""
ONLY = {
    "pynvml": {"device.nvml"},
    "optuna": {"tuning.keeping", "tuning.ratestudy", "tuning.sampler", "tuning.storage", "tuning.study"},
    "torch.distributed": {"distributed"},
    "tyro": {"arguments"},
}
"""Libraries that one module alone may import."""


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            found[name] = path
    return found


def room_of(module: str) -> str:
    return module.partition(".")[0]


def floor_of(module: str) -> int | None:
    """The floor of a module: its own name's, else that of the package that it is in."""
    for name in (module, room_of(module)):
        for number, rooms in enumerate(FLOORS):
            if name in rooms:
                return number
    return None


def imports(path: Path) -> list[tuple[str, bool]]:
    """Every imported module, and whether the import is only for type checkers."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in typing_only) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.module, id(node) in typing_only))
            found += [(f"{node.module}.{alias.name}", id(node) in typing_only) for alias in node.names]
    return found


@pytest.mark.parametrize("module", sorted(modules()))
def test_a_room_imports_only_rooms_below_it(module: str) -> None:
    if modules()[module].name == "__init__.py" and module != "demo":
        return  # a docstring
    own = floor_of(module)
    assert own is not None, f"{module} has no floor: give it one in this test and in the README's map"
    known = modules()
    for target, typing_only in imports(known[module]):
        name = target.removeprefix("autobatch.")
        if not target.startswith("autobatch.") or name not in known or typing_only:
            continue
        if known[name].name == "__init__.py" and name != "demo":
            continue  # a docstring: what is imported from it is a module, and comes by its own name
        other = floor_of(name)
        same_room = room_of(name) == room_of(module) and own == other
        assert other is not None
        assert other < own or same_room, f"{module} (floor {own}) imports {name} (floor {other})"


@pytest.mark.parametrize("module", sorted(modules()))
def test_some_libraries_have_one_door(module: str) -> None:
    for target, typing_only in imports(modules()[module]):
        for library, doors in ONLY.items():
            if (target == library or target.startswith(library + ".")) and not typing_only:
                assert module in doors, f"{module} imports {library}: only {', '.join(doors)} may"


def test_reports_never_import_torch() -> None:
    for module, path in modules().items():
        if module.startswith("report") or module in ("records", "config", "planning", "units", "errors"):
            assert not [t for t, _ in imports(path) if t.split(".")[0] == "torch"], module


def test_only_the_command_line_prints_or_exits() -> None:
    for module, path in modules().items():
        calls = {
            getattr(node.func, "id", None) or getattr(node.func, "attr", None)
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        if module != "cli":
            assert not calls & {"print", "exit", "quit"}, module
