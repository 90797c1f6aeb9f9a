"""Help of the benchmarks: it runs nothing, and unknown options are refused."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

import benchmarks

ROOT = Path(benchmarks.__path__[0])
PROGRAMS = [path for path in sorted(ROOT.rglob("*.py")) if "__main__" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_help_of_a_benchmark_runs_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = path.read_text(encoding="utf-8")
    assert "parse_args(" in text or "arguments(" in text, "without it, --help runs the benchmark"
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")
