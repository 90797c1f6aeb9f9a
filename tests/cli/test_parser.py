"""The words of a command, config files and variables: how they are read, which wins, and what help shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from autobatch import InputError
from autobatch.cli.parser import parse
from autobatch.core.options import COMMANDS, Options, fields_of


@pytest.fixture(autouse=True)
def an_empty_folder_and_a_screen_of_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "config/autobatch").mkdir(parents=True)


def parsed(*words: str, command: str = "fit", **environ: str) -> tuple[str | None, Options]:
    target = ("--target-batch", "8") if command == "fit" else ()
    return parse(command, [*target, *words], folder=Path.cwd(), environ=environ)


def test_later_sources_win() -> None:
    """Earliest first; autobatch.toml replaces the whole table of pyproject.toml."""
    Path("config/autobatch/config.toml").write_text("steps = 1\nkeep_last = 9\n")
    assert parsed()[1].steps == 1
    Path("pyproject.toml").write_text('[tool.autobatch]\nsteps = 2\ntrials = 3\nworkload = "a:b"\n')
    workload, options = parsed()
    assert (workload, options.steps, options.trials) == ("a:b", 2, 3)
    Path("autobatch.toml").write_text('steps = 3\nworkload = "c:d"\n')
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
        ("autobatch.toml", "[fit]\nsteps = 3", "there is no option fit"),
        ("autobatch.toml", "steps = ", "is not TOML"),
        ("autobatch.toml", "steps = true", "must be a whole number of 1 or more, found True"),
        ("autobatch.toml", "out = 1979-05-27", "out in .* must be text"),
        ("autobatch.toml", "workload = 3", "workload in .* must be file.py"),
        ("autobatch.toml", "memory_budget = 'lots'", "memory_budget in .*: 'lots' is not a size in bytes"),
        ("autobatch.toml", "timeout = nan", "timeout in .* must be a number over 0, found nan"),
        ("autobatch.toml", "keep-last = 9", r"there is no option keep-last; did you mean keep_last\?"),
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
    others = {"AUTOBATCH_HOME": "/home", "AUTOBATCH_STEPS": "", "PATH": "/bin", "autobatch_steps": "4"}
    assert parsed(**others) == parsed()
    for variables, said in (
        ({"AUTOBATCH_STPES": "3"}, r"the environment: .*AUTOBATCH_STPES; did you mean AUTOBATCH_STEPS\?"),
        ({"AUTOBATCH_STEPS": "x"}, "AUTOBATCH_STEPS must be a whole number of 1 or more, found 'x'"),
    ):
        with pytest.raises(InputError, match=said):
            parsed(**variables)


def test_a_switch_can_be_taken_back() -> None:
    Path("autobatch.toml").write_text("json = true\nquiet = true\n")
    options = parsed("--no-json")[1]
    assert (options.json, options.quiet, options.resume) == (False, True, False)
    assert parsed("--json", "--resume", AUTOBATCH_QUIET="false")[1].quiet is False


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
        *(("probe", words, "json", True) for words in (["a:b", "--json"], ["--json", "--", "a:b"])),
    ],
)
def test_words_may_stand_anywhere(command: str, words: list[str], option: str, value: object) -> None:
    workload, options = parsed(*words, command=command, AUTOBATCH_PROFILE="saved")
    assert options.by_name()[option] == value
    assert workload == ("a:b" if "a:b" in words else None)


def help_text(command: str, word: str, capsys: pytest.CaptureFixture[str], **environ: str) -> str:
    with pytest.raises(SystemExit) as stop:
        parse(command, [word], folder=Path(), environ=environ)
    assert not stop.value.code
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    return text


def listed(text: str) -> set[str]:
    """Return the options that a help text shows."""
    starts = [line.split()[0].rstrip(",") for line in text.splitlines() if line.startswith("  --")]
    return {start.removeprefix("--").replace("-", "_") for start in starts}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_one_screen_and_help_all_has_every_option(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = fields_of(name)
    text = help_text(name, "--help", capsys)
    assert len(text.splitlines()) <= 40
    assert listed(text) == {option for option, field in fields.items() if not field.rare}
    text = help_text(name, "--help-all", capsys)
    assert listed(text) == fields.keys()
    assert all("".join(field.text.split()) in "".join(text.split()) for field in fields.values())


def test_the_help_shows_defaults_and_their_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert "(required)" in help_text("fit", "--help", capsys)
    Path("autobatch.toml").write_text("trials = 3\n")
    text = " ".join(help_text("fit", "--help-all", capsys, AUTOBATCH_TARGET_BATCH="64").split())
    for words in ("1800.0)", "3, from trials in autobatch.toml)", "64, from AUTOBATCH_TARGET_BATCH)"):
        assert f"(default: {words}" in text
    assert "None" not in text
    assert "(required)" not in text
