"""The words of a command, config files and variables: how they are read, which wins, and what help shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from autobatch import InputError
from autobatch.cli.parser import help_of, parse
from autobatch.core.options import COMMANDS, Options, fields_of


@pytest.fixture(autouse=True)
def an_empty_folder_and_a_screen_of_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


def parsed(*words: str, command: str = "fit", **environ: str) -> tuple[str | None, Options]:
    target = ("--target-batch", "8") if command == "fit" else ()
    with pytest.MonkeyPatch.context() as patched:
        for name, value in environ.items():
            patched.setenv(name, value)
        return parse(command, [*target, *words])


def test_later_sources_win() -> None:
    """Earliest first; autobatch.toml replaces the whole table of pyproject.toml."""
    Path("pyproject.toml").write_text('[tool.autobatch]\nsteps = 2\ntrials = 3\nworkload = "a:b"\n')
    workload, options = parsed()
    assert (workload, options.steps, options.trials) == ("a:b", 2, 3)
    Path("autobatch.toml").write_text('steps = 3\nkeep_last = 9\nworkload = "c:d"\n')
    workload, options = parsed()
    assert (workload, options.steps, options.trials) == ("c:d", 3, None)
    known = {"AUTOBATCH_STEPS": "4", "AUTOBATCH_WORKLOAD": "g:h"}
    workload, options = parsed(**known)
    assert (workload, options.steps) == ("g:h", 4)
    workload, options = parsed("e:f", "--steps", "5", **known)
    assert (workload, options.steps, options.keep_last) == ("e:f", 5, 9)


def test_the_later_of_two_exclusive_options_wins() -> None:
    Path("autobatch.toml").write_text("epochs = 3\n")
    options = parsed("--steps", "5")[1]
    assert (options.steps, options.epochs) == (5, None)
    options = parsed("--epochs", "2", AUTOBATCH_STEPS="7")[1]
    assert (options.steps, options.epochs) == (None, 2)
    with pytest.raises(InputError, match=r"--steps 5 and --epochs 2 exclude each other"):
        parsed("--steps", "5", "--epochs", "2")


def test_a_file_may_hold_options_of_other_commands() -> None:
    Path("autobatch.toml").write_text("steps = 3\ntarget_batch = 8\nprofile = 'l4'\nmax_micro_batch = 4\n")
    assert parsed(command="estimate")[1].profile == ["l4"]
    options = parsed("--lr-rule", "linear", "--base-batch=4", command="plan")[1]
    assert (options.target_batch, options.max_micro_batch) == (8, 4)
    assert (options.lr_rule, options.base_batch) == ("linear", 4)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("autobatch.toml", "stpes = 3", r"there is no option stpes; did you mean steps\?"),
        ("autobatch.toml", "steps = ", "is not TOML"),
        ("autobatch.toml", "steps = true", "steps in .* must be a whole number of 1 or more, found True"),
        ("autobatch.toml", "workload = 3", "workload in .* must be file.py"),
        ("autobatch.toml", "memory_budget = 'lots'", "memory_budget in .*: 'lots' is not a size in bytes"),
        ("pyproject.toml", "tool = 3", "tool must be a table, found 3"),
        ("pyproject.toml", "\xff = ", "is not TOML"),
    ],
)
def test_an_invalid_file_is_named_with_the_expected_value(
    name: str, content: str, said: str, tmp_path: Path
) -> None:
    Path(name).write_text(content, encoding="latin-1")
    with pytest.raises(InputError, match=said) as found:
        parsed()
    assert str(tmp_path / name) in str(found.value)
    assert "\n" not in str(found.value)


def test_variables_are_options_unless_they_are_empty_or_of_others() -> None:
    others = {"AUTOBATCH_HOME": "/home", "AUTOBATCH_STEPS": "", "autobatch_steps": "4"}
    assert parsed(**others) == parsed()
    for variables, said in (
        ({"AUTOBATCH_STPES": "3"}, r"the environment: .*AUTOBATCH_STPES; did you mean AUTOBATCH_STEPS\?"),
        ({"AUTOBATCH_STEPS": "x"}, "AUTOBATCH_STEPS must be a whole number of 1 or more, found 'x'"),
    ):
        with pytest.raises(InputError, match=said):
            parsed(**variables)


@pytest.mark.parametrize(
    ("command", "words", "option", "value"),
    [
        (
            "estimate",
            ["--profile", "a", "--profile=b", "--profile", "c", "d", "--json"],
            "profile",
            [*"abcd"],
        ),
        ("estimate", ["--json"], "profile", ["saved"]),
        ("fit", ["--log", "wandb", "a:b", "--log", "mlflow"], "log", ["wandb", "mlflow"]),
        ("fit", ["--out=-x"], "out", "-x"),
        ("fit", ["--out", "-"], "out", "-"),
        ("fit", ["--out", "a=b"], "out", "a=b"),
        ("fit", ["--json"], "json", True),
        ("fit", ["--json", "--no-json"], "json", False),
        ("tune", ["--target-batch", "8", "--json", "--", "a:b"], "json", True),
    ],
)
def test_words_may_stand_anywhere(command: str, words: list[str], option: str, value: object) -> None:
    workload, options = parsed(*words, command=command, AUTOBATCH_PROFILE="saved")
    assert options.by_name()[option] == value
    assert workload == ("a:b" if "a:b" in words else None)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_one_screen_and_help_all_has_every_option(name: str) -> None:
    assert len(help_of(name, "run", shows_all=False).splitlines()) <= 45
    for shows_all in (False, True):
        text = help_of(name, "run", shows_all=shows_all)
        wanted = [field for field in fields_of(name).values() if shows_all or not field.rare]
        assert "None" not in text
        assert max(map(len, text.splitlines())) <= 80
        listed = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
        assert sorted(listed) == sorted(f"--{field.name.replace('_', '-')}" for field in wanted)
        assert all("".join(field.text.split()) in "".join(text.split()) for field in wanted)
