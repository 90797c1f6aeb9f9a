"""The code in docstrings runs as it stands, as a script that knows only what the text names."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.libraries import installed
from tests.support.rank_server import RankServer

ROOT = Path(__file__).parents[1]
PUBLIC = ("integrations",)
"""Layers whose docstrings show code to users."""
CODE = re.compile(r"(?:^|\n\n)((?: {4}.*\n|\n)+)")
SETTING = """\
import warnings
warnings.simplefilter("ignore")
import autobatch
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from tests.support.docstrings import *
"""
"""Lines that a docstring may take for granted, beside the names of `tests.support.docstrings`."""


def examples() -> list[tuple[str, str]]:
    """Return the code of every docstring of the public layers, with the name of its owner."""
    found = []
    for layer in PUBLIC:
        for path in sorted((ROOT / "autobatch" / layer).glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                    name = f"{path.stem}:{getattr(node, 'name', 'module')}"
                    body = ast.get_docstring(node) or ""
                    text = body.split("\nArgs:")[0]
                    code = "".join(one for one in CODE.findall(text + "\n") if one.strip())
                    found += [(name, code)] if code else []
    return found


EXAMPLES = examples()


def test_the_modules_of_all_libraries_show_code() -> None:
    shown = {name.partition(":")[0] for name, _ in EXAMPLES}
    assert shown >= {"transformers", "lightning", "accelerate", "own_loop"}


@pytest.mark.program
@pytest.mark.parametrize(("owner", "code"), EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_the_code_of_a_docstring_runs(owner: str, code: str, runner: RankServer, tmp_path: Path) -> None:
    library = owner.partition(":")[0]
    if library in ("transformers", "lightning", "accelerate"):
        installed(library)
    setting = f"{SETTING}globals().update(set_up({library!r}))\n"
    script = tmp_path / "script.py"
    script.write_text(setting + re.sub(r"(?m)^ {4}", "", code))
    runner.script(script, tmp_path)


@pytest.mark.program
def test_adapters_are_reached_after_the_plain_import(tmp_path: Path) -> None:
    """Neither torch nor another library is imported before something needs it."""
    code = (
        "import sys, autobatch\n"
        "autobatch.integrations\n"
        "assert 'torch' not in sys.modules\n"
        "assert autobatch.integrations.transformers.plan\n"
        "assert autobatch.integrations.accelerate.plan\n"
        "assert not {'transformers', 'lightning', 'accelerate'} & set(sys.modules)\n"
        "assert autobatch.integrations.lightning.AutobatchFinder\n"
        "try:\n    autobatch.integrations.keras\nexcept AttributeError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (
        0,
        "module 'autobatch.integrations' has no attribute 'keras'\n",
    ), done.stderr
