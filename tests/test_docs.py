"""The documents: their links, their code and their options match the repository."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import tomllib
from pathlib import Path

import pytest

from autobatch.cli.commands import record
from autobatch.core.options import fields_of, options_from
from autobatch.device.profiles import read_profile

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs/reference.md"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks/README.md"])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
OPTION = re.compile(r"(?<![\w-])--([a-z][a-z-]*[a-z])")


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks(path: Path, language: str) -> list[str]:
    return [body for found, body in BLOCK.findall(text_of(path)) if found == language]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve_code_parses_and_options_exist(path: Path) -> None:
    for target in LINK.findall(text_of(path)):
        if "://" not in target:
            assert (path.parent / target.partition("#")[0]).exists(), target
    for code in blocks(path, "python"):
        ast.parse(code)  # `ruff format` checks its form
    for code in blocks(path, "bash"):
        done = subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        for line in code.splitlines():
            command = line.partition("autobatch ")[2].partition("#")[0].partition(" -- ")[0]
            if command and "pip" not in line:
                known = {field.replace("_", "-") for field in fields_of(command.split()[0])}
                known |= set(OPTION.findall(record.__doc__ or "")) if command.startswith("record ") else set()
                assert set(OPTION.findall(command)) <= known, command
    for name in re.findall(r"`((?:autobatch|tests|benchmarks)/[\w/.]+)`", text_of(path)):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", text_of(path)):
        assert any((root / name).exists() for root in (ROOT, ROOT / "autobatch")), name


@pytest.mark.program
def test_the_reference_is_that_of_the_source() -> None:
    """``python docs/_hooks/reference.py`` writes it again."""
    page_of = runpy.run_path(str(ROOT / "docs/_hooks/reference.py"))["page_of"]
    assert page_of(text_of(REFERENCE)) == text_of(REFERENCE)


def test_the_config_files_on_the_page_hold_options() -> None:
    (example,) = blocks(REFERENCE, "toml")
    table = tomllib.loads(example)
    del table["workload"]
    options = options_from("fit", table)
    assert table == {name: getattr(options, name) for name in table}


def test_the_profile_on_the_page_is_one(tmp_path: Path) -> None:
    (example,) = blocks(ROOT / "docs/which-gpu.md", "toml")
    (tmp_path / "my-gpu.toml").write_text(example, encoding="utf-8")
    assert read_profile(tmp_path / "my-gpu.toml").name == "my-gpu"
