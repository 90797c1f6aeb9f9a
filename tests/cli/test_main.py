"""The command line in this process: general questions, wrong input, and what it imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autobatch.cli import main as cli
from tests.support.commandline import environment

FIT = ("fit", "--target-batch", "8")
REFUSED = [
    (("pla",), "there is no command 'pla'; did you mean plan?"),
    (("conquer",), "there is no command 'conquer'; the commands are fit, plan, probe, tune"),
    (("--conquer",), "there is no option '--conquer' before a command; see autobatch --help"),
    (("fit",), "--target-batch is missing: give a whole number of 1 or more"),
    (("fit", "--target-batch"), "--target-batch has no value: give a whole number of 1 or more"),
    (
        ("fit", "--target-batch", "--steps", "3"),
        "--target-batch has no value: give a whole number of 1 or more",
    ),
    (("fit", "--target-batch="), "--target-batch must be a whole number of 1 or more, found ''"),
    (("fit", "--target-batch", "0"), "--target-batch must be a whole number of 1 or more, found '0'"),
    (("fit", "--target-bacth", "8"), "there is no option --target-bacth; did you mean --target-batch?"),
    ((*FIT, "--frobnicate"), "there is no option --frobnicate; see autobatch fit --help-all"),
    ((*FIT, "--log", "a"), "--log must be one or more of tensorboard, wandb, mlflow, trackio, found 'a'"),
    (("completion",), "completion takes the name of a shell, found none: write completion bash, "),
    ((*FIT, "--json=yes"), "--json takes no value, found 'yes'"),
    (("estimate", "--profile", "--json"), "--profile has no value: give one or more names"),
    ((*FIT, "a:b", "c:d"), "give one WORKLOAD, found 'a:b' and 'c:d'; see autobatch fit --help"),
    ((*FIT, ""), "WORKLOAD must be file.py, file.py:function or module:function, found ''"),
    ((*FIT, "\udcc3.py"), "WORKLOAD '\\udcc3.py' is not valid in the encoding of this locale: set LC_ALL="),
    ((*FIT, "--memory-budget", "nonsense"), "--memory-budget: 'nonsense' is not a size in bytes"),
    ((*FIT, "--steps", "3", "--epochs", "2"), "--steps 3 and --epochs 2 exclude each other: give one"),
    (
        ("probe", "--steps", "3"),
        "probe does not take --steps, which is an option of fit; see autobatch",
    ),
    (("profiles", "shwo"), "there is no action 'shwo' of profiles: use list, show NAME or save NAME"),
    (
        ("profiles", "show"),
        "write profiles list, profiles show NAME or profiles save NAME, found 'show'",
    ),
    (("doctor", "now"), "doctor takes no arguments, found now"),
    (("report", "a", "b"), "report takes the folder of one run, found 2: write report runs/NAME/DATE"),
]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize(("words", "said"), REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_wrong_input_is_one_line_and_exit_2(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(list(words)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"autobatch: {said}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ("\x1b[31mpla\x9b",),
        (*FIT, "\x1b[31m:w"),
        (*FIT, "a\nb.py:\x1b[31mw"),
        (*FIT, "--\x1b[31mout"),
        (*FIT, "--out\x1b=3"),
        (*FIT, "--precision", "\x1b[31m\udcff"),
        ("profiles", "show", "\x1b[31m"),
        ("doctor", "\x1b[31m"),
        ("doctor", "--\x1b[31m"),
        ("report", "\x1b[31m"),
        (*FIT, "--verbose", "\x1b[31m:w"),
        (*FIT, "x" * 100_000),
        (*FIT, "--precision", "x" * 100_000),
        (*FIT, "--" + "x" * 100_000),
    ],
    ids=range(14),
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
    capsys: pytest.CaptureFixture[str],
) -> None:
    demo = "autobatch.workload.demo:workload"
    assert cli.run(["estimate", demo, "--profile", "t4", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["estimates"][0]["profile"] == "t4"
    assert "t4" in err
    assert cli.run(["estimate", "nowhere.py"]) == 2
    assert "there is no file nowhere.py" in capsys.readouterr().err
