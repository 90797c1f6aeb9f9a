"""The command line in this process: general questions, wrong input, and what it imports."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from autobatch.cli import main as cli
from tests.support.commandline import run

FIT = ("fit", "--target-batch", "8")
RECORD = ("record", "--out", "a.pickle")
COMMAND = ("--", "train", "{}", "{steps}")
ESCAPED = "\x1b[31m"
REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("pla",), "did you mean plan?"),
    (("conquer",), "there is no command 'conquer'"),
    (("train.py",), "did you mean fit train.py?"),
    ((*FIT, "--out", ""), "--out must be a folder"),
    (("fit",), "--target-batch is missing: give a whole number of 1 or more"),
    (("fit", "--target-batch", "--steps", "3"), "--target-batch has no value after it"),
    (("fit", "--target-batch="), "found ''"),
    (("fit", "--target-batch", "-8"), "--target-batch must be a whole number of 1 or more, found '-8'"),
    (("init", __file__), "cannot be written (File exists): name another folder"),
    (("fit", "--target-bacth", "8"), "did you mean --target-batch?"),
    ((*FIT, "--frobnicate"), "there is no option --frobnicate; see autobatch fit --help-all"),
    ((*FIT, "--no-steps"), "there is no option --no-steps"),
    ((*FIT, "--json=yes"), "--json: ignored explicit argument"),
    (("estimate", "--profile", "--json"), "--profile: expected at least one argument"),
    ((*FIT, "a:b", "c:d"), "give one WORKLOAD, found 'a:b' and 'c:d'"),
    ((*FIT, ""), "WORKLOAD must be file.py"),
    (("probe", "--target-batch", "8"), "which is an option of fit, plan, tune and estimate; see"),
    (("profiles", "shwo"), "found 'shwo'"),
    (("profiles", "show", "rtx4090"), "no profile 'rtx4090': known are a10, "),
    (("doctor", "now"), "takes no arguments, found 'now'"),
    (("record",), "--out FILE"),
    (RECORD, "a command after --"),
    ((*RECORD, "--steps", "0", *COMMAND), "--steps"),
    (("record", "--out", "none/a.pickle", *COMMAND), "there is no folder"),
    (("probe", "--", "train", "8"), "the size of a micro-batch"),
    (("plan", "--target-batch", "8", "--", "train", "{}"), "{steps}"),
    (("plan", *COMMAND), "--target-batch is missing"),
    ((*FIT, "--json", *COMMAND), "plan --json"),
    (("probe", "--batch_size=4", *COMMAND), "--batch_size"),
    (("probe", "train.py", *COMMAND), "'train.py'"),
    (("probe", "--seconds", "0", *COMMAND), "--seconds"),
    (("probe", "--device", "cpu", *COMMAND), "see autobatch probe --help-all -- COMMAND"),
    (("probe", "--memory-budget=-1GiB"), "'-1GiB'"),
    (("probe", "--"), "the size of a micro-batch"),
    (("probe", "python", "train.py", "--batch_size={}"), "need -- before it"),
    (("tune", "--", "python", "train.py", "--batch_size={}"), "probe, plan and fit take a program"),
    (("estimate", "nowhere.py"), "there is no file nowhere.py"),
    (("pla" + ESCAPED,), r"'pla\x1b[31m'"),
    ((*FIT, "a\nb.py:" + ESCAPED), r"there is no file a\nb.py"),
    ((*FIT, "--precision", "\x9b\udcff"), r"\x9b\udcff"),
    (("compare",), "compare takes two or more different runs: give RUN RUN"),
    (("compare", "a", "a/."), "two or more different runs"),
    (("compare", ESCAPED, "a"), r"\x1b[31m is not the folder of a run"),
    ((*FIT, "--" + "x" * 100_000), "xxx"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED, ids=range(len(REFUSED)))
def test_wrong_input_is_one_harmless_line_and_exit_2(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([*words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("autobatch: ")
    assert said in err
    assert err.rstrip("\n").isprintable()
    assert len(err) <= 2020
    assert not list(tmp_path.iterdir())


def test_keys_with_control_characters_are_shown_and_never_obeyed_also_verbosely(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "autobatch.toml").write_text('"\\u001b[31m" = 1', encoding="utf-8")
    assert cli.run([*FIT, "--verbose"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert r"\x1b[31m" in lines[0]
    assert lines[1] == "Traceback (most recent call last):"
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_the_help_names_every_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(words) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert max(map(len, out.splitlines())) <= 80
    assert all(f"\n  {name} " in out for name in cli.COMMANDS)


def test_help_of_each_command_and_wrong_input_import_nothing_heavy(tmp_path: Path) -> None:
    code = """
import sys
from autobatch.cli import main as cli
for words in (["--help"], ["--version"], ["pla"], *([name, "--help"] for name in cli.COMMANDS),
              ["probe", "--help", "--", "x"], *([name, "--help-all"] for name in cli.COMMANDS)):
    cli.run(words)
cli.run(["fit", "--target-batch", "0"])
heavy = {"torch", "optuna", "numpy", "scipy", "matplotlib", "rich"} & set(sys.modules)
assert not heavy, heavy
"""
    done = run(tmp_path, [sys.executable, "-c", code])
    assert done.code == 0, done.err
    assert all(f"usage: autobatch {name}" in done.out for name in cli.COMMANDS)
