"""The command line in this process: general questions, wrong input, and what it imports."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from autobatch.cli import main as cli
from tests.support.commandline import SMALL, environment

FIT = ("fit", "--target-batch", "8")
REFUSED = [
    ("pla",), ("conquer",), ("--conquer",), ("fit",), ("fit", "--target-batch"),
    ("fit", "--target-batch", "--steps", "3"), ("fit", "--target-batch="), ("fit", "--target-batch", "0"),
    ("fit", "--target-bacth", "8"), (*FIT, "--frobnicate"), (*FIT, "--log", "a"), ("completion",),
    (*FIT, "--json=yes"), ("estimate", "--profile", "--json"), (*FIT, "a:b", "c:d"), (*FIT, ""),
    (*FIT, "--memory-budget", "nonsense"), (*FIT, "--steps", "3", "--epochs", "2"),
    ("probe", "--steps", "3"), ("profiles", "shwo"), ("profiles", "show"), ("doctor", "now"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


def test_wrong_input_is_one_line_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What each says is in `refused.txt`, which ``SNAPSHOTS=write`` in the environment writes again."""
    shown = []
    for words in REFUSED:
        assert cli.run(list(words)) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        shown.append(f"$ autobatch {shlex.join(words)}\n{err}")
    assert not list(tmp_path.iterdir())
    path, text = Path(__file__).with_name("refused.txt"), "\n".join(shown)
    if os.environ.get("SNAPSHOTS") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "words",
    [
        ("\x1b[31mpla\x9b",),
        (*FIT, "\x1b[31m:w"),
        (*FIT, "a\nb.py:\x1b[31mw"),
        (*FIT, "--\x1b[31mout"),
        (*FIT, "--out\x1b=3"),
        (*FIT, "--precision", "\x1b[31m\udcff"),
        (*FIT, "\udcc3.py"),
        ("profiles", "show", "\x1b[31m"),
        ("doctor", "\x1b[31m"),
        ("doctor", "--\x1b[31m"),
        ("compare", "\x1b[31m", "a"),
        (*FIT, "--verbose", "\x1b[31m:w"),
        (*FIT, "x" * 100_000),
        (*FIT, "--precision", "x" * 100_000),
        (*FIT, "--" + "x" * 100_000),
    ],
    ids=range(15),
)
def test_words_of_the_user_are_shown_and_never_obeyed(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(list(words)) == 2
    err = capsys.readouterr().err
    first, *rest = err.splitlines()
    assert first.startswith("autobatch: ")
    assert all(line.isprintable() for line in (first, *rest))
    assert len(first) <= 2020
    assert bool(rest) == ("--verbose" in words)


def test_keys_and_variables_with_control_characters_are_shown_and_never_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AUTOBATCH_\x1b[31m", "1")
    assert cli.run([*FIT]) == 2
    monkeypatch.delenv("AUTOBATCH_\x1b[31m")
    (tmp_path / "autobatch.toml").write_text('"\\u001b[31m" = 1', encoding="utf-8")
    assert cli.run([*FIT]) == 2
    (tmp_path / "autobatch.toml").write_text('workload = "\\u001b[31m\\u009b:w"', encoding="utf-8")
    assert cli.run(["fit", "--help"]) == 0
    out, err = capsys.readouterr()
    assert err.count("\n") == 2
    assert r"\x1b[31m" in out
    assert all(line.isprintable() for line in (out + err).splitlines())


def test_verbose_adds_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*FIT, "--steps", "0", "--verbose"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("autobatch: --steps must be")
    assert "Traceback (most recent call last)" in err


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_the_help_names_every_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(words) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("usage: autobatch COMMAND")
    assert max(map(len, out.splitlines())) <= 80
    assert all(f"\n  {name} " in out for name in cli.RUNNING + cli.OTHER)


def test_help_and_wrong_input_import_nothing_heavy(tmp_path: Path) -> None:
    code = """
import sys
from autobatch.cli import main as cli
for words in (["--help"], ["--version"], ["pla"], *([name, "--help"] for name in cli.RUNNING + cli.OTHER),
              *([name, "--help-all"] for name in cli.RUNNING)):
    cli.run(words)
cli.run(["fit", "--target-batch", "0"])
heavy = {"torch", "optuna", "numpy", "scipy", "matplotlib", "rich"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()


def test_json_is_all_of_standard_output_and_a_wrong_reference_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small.py").write_text(SMALL)
    assert cli.run(["estimate", "small.py", "--profile", "t4", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["estimates"][0]["profile"] == "t4"
    assert "t4" in err
    assert cli.run(["estimate", "nowhere.py"]) == 2
    assert "there is no file nowhere.py" in capsys.readouterr().err
