"""The words of a command, config files and variables: how they are read, which wins, and what help shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autobatch import InputError
from autobatch.cli.parser import parse
from autobatch.core.options import fields_of

RUNNING = ("fit", "plan", "probe", "tune", "estimate")

PLACES = ("config.toml", "pyproject.toml", "autobatch.toml", "variable", "command line")
"""Earliest first: later ones win."""


def give(place: str, folder: Path, environ: dict[str, str], words: list[str], steps: int) -> None:
    match place:
        case "config.toml":
            path = folder / "config" / "autobatch" / "config.toml"
            path.parent.mkdir(parents=True)
            path.write_text(f"steps = {steps}\n")
        case "pyproject.toml":
            (folder / "pyproject.toml").write_text(f"[tool.autobatch]\nsteps = {steps}\n")
        case "autobatch.toml":
            (folder / "autobatch.toml").write_text(f"steps = {steps}\n")
        case "variable":
            environ["AUTOBATCH_STEPS"] = str(steps)
        case _:
            words += ["--steps", str(steps)]


def parsed(folder: Path, *words: str, **environ: str) -> tuple[str | None, Any]:
    return parse("fit", ["--target-batch", "8", *words], folder=folder, environ=environ)


@pytest.fixture(autouse=True)
def a_screen_of_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.mark.parametrize("number", range(len(PLACES)))
def test_later_sources_win(number: int, tmp_path: Path) -> None:
    environ: dict[str, str] = {}
    words: list[str] = []
    for steps, place in enumerate(PLACES[: number + 1], start=1):
        give(place, tmp_path, environ, words, steps)
    _, options = parsed(tmp_path, *words, **environ)
    assert options.train.steps == number + 1


def test_autobatch_toml_replaces_the_table_of_pyproject(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.autobatch]\ntrials = 3\nworkload = "a:b"\n')
    assert parsed(tmp_path)[0] == "a:b"
    assert parsed(tmp_path)[1].tune.trials == 3
    (tmp_path / "autobatch.toml").write_text('steps = 2\nworkload = "c:d"\n')
    workload, options = parsed(tmp_path)
    assert (workload, options.tune.trials, options.train.steps) == ("c:d", None, 2)
    assert parsed(tmp_path, "e:f")[0] == "e:f"
    assert parsed(tmp_path, AUTOBATCH_WORKLOAD="g:h")[0] == "g:h"


def test_the_later_of_two_exclusive_options_wins(tmp_path: Path) -> None:
    (tmp_path / "autobatch.toml").write_text("epochs = 3\n")
    options = parsed(tmp_path, "--steps", "5")[1]
    assert (options.train.steps, options.train.epochs) == (5, None)
    options = parsed(tmp_path, "--epochs", "2", AUTOBATCH_STEPS="7")[1]
    assert (options.train.steps, options.train.epochs) == (None, 2)
    with pytest.raises(InputError, match=r"--steps 5 and --epochs 2 exclude each other: give one"):
        parsed(tmp_path, "--steps", "5", "--epochs", "2")


def test_a_list_option_accepts_a_single_value(tmp_path: Path) -> None:
    (tmp_path / "autobatch.toml").write_text("profile = 'l4'\n")
    assert parse("estimate", [], folder=tmp_path, environ={})[1].search.profile == ["l4"]


def test_options_of_other_commands_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "autobatch.toml").write_text("steps = 3\ntarget_batch = 8\n")
    _, options = parse("probe", [], folder=tmp_path, environ={})
    assert options.command == "probe"
    assert parse("plan", [], folder=tmp_path, environ={})[1].target_batch == 8


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("stpes = 3", r"autobatch.toml: there is no option stpes; did you mean steps\?"),
        ("zzz = 3", "autobatch.toml: there is no option zzz; there are: base_batch"),
        ("[fit]\nsteps = 3", "there is no option fit"),
        ("steps = ", "autobatch.toml is not TOML"),
        ("steps = 0", "steps in .*autobatch.toml must be a whole number of 1 or more, found 0"),
        ("steps = true", "must be a whole number of 1 or more, found True"),
        ("device = 3", "device in .* must be text, found 3"),
        ("out = 1979-05-27", "out in .* must be text"),
        ("workload = 3", "workload in .* must be file.py"),
        ("memory_budget = 'lots'", "memory_budget in .*: 'lots' is not a size in bytes"),
        ("timeout = nan", "timeout in .* must be a number over 0, found nan"),
    ],
)
def test_an_invalid_file_is_named_with_the_expected_value(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "autobatch.toml").write_text(content + "\n")
    with pytest.raises(InputError, match=said) as found:
        parsed(tmp_path)
    assert str(tmp_path) in str(found.value)
    assert "\n" not in str(found.value)


def test_other_invalid_sources_are_named(tmp_path: Path) -> None:
    for variables, said in (
        ({"AUTOBATCH_STPES": "3"}, r"the environment: .*AUTOBATCH_STPES; did you mean AUTOBATCH_STEPS\?"),
        ({"AUTOBATCH_STEPS": "x"}, "AUTOBATCH_STEPS must be a whole number of 1 or more, found 'x'"),
    ):
        with pytest.raises(InputError, match=said):
            parsed(tmp_path, **variables)
    for content in ("tool = 3", "[tool]\nautobatch = 3"):
        (tmp_path / "pyproject.toml").write_text(content)
        with pytest.raises(InputError, match=r"pyproject.toml: (tool|autobatch) must be a table, found 3"):
            parsed(tmp_path)
    (tmp_path / "pyproject.toml").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"pyproject.toml is not TOML"):
        parsed(tmp_path)
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'theirs'\n")
    assert parsed(tmp_path)[1].train.steps is None


def test_other_variables_are_ignored(tmp_path: Path) -> None:
    environ = {"AUTOBATCH_HOME": "/home", "AUTOBATCH_STEPS": "", "PATH": "/bin", "autobatch_steps": "4"}
    assert parsed(tmp_path, **environ)[1] == parsed(tmp_path)[1]


@pytest.mark.parametrize("order", [("target-batch", "target_batch"), ("target_batch", "target-batch")])
def test_one_option_in_two_spellings_is_refused(tmp_path: Path, order: tuple[str, str]) -> None:
    lines = [f"{name} = {number}" for number, name in enumerate(order, 8)]
    (tmp_path / "autobatch.toml").write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(InputError, match=f"has both {order[0]} and {order[1]}, which are one"):
        parsed(tmp_path)


def help_text(command: str, word: str, capsys: pytest.CaptureFixture[str], **environ: str) -> str:
    with pytest.raises(SystemExit) as stop:
        parse(command, [word], folder=Path(), environ=environ)
    assert not stop.value.code
    out, err = capsys.readouterr()
    assert err == ""
    return out


def group_of(text: str) -> dict[str, str]:
    """Return the group of each option that a help text shows, in its order."""
    found: dict[str, str] = {}
    title = ""
    for line in text.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            title = line.removesuffix(":")
        elif line.startswith("  --"):
            found[line.split()[0].removeprefix("--").rstrip(",").replace("-", "_")] = title
    return found


def test_dashes_and_underscores_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "autobatch.toml").write_text('memory-budget = "6GiB"\nmax_micro_batch = 4\n')
    options = parsed(tmp_path, "--lr_rule", "linear", "--base-batch=4")[1]
    assert (options.device.memory_budget, options.search.max_micro_batch) == ("6GiB", 4)
    assert (options.batch.lr_rule, options.batch.base_batch) == ("linear", 4)


def test_a_switch_can_be_taken_back(tmp_path: Path) -> None:
    (tmp_path / "autobatch.toml").write_text("json = true\nquiet = true\n")
    options = parsed(tmp_path, "--no-json")[1]
    assert (options.output.json, options.output.quiet, options.train.resume) == (False, True, False)
    assert parsed(tmp_path, "--json", "--resume", AUTOBATCH_QUIET="false")[1].output.quiet is False


@pytest.mark.parametrize(
    ("words", "profiles"),
    [
        (["--profile", "a", "--profile=b", "--profile", "c", "d", "--json"], ["a", "b", "c", "d"]),
        (["--profile", "a", "b"], ["a", "b"]),
        (["--json"], ["saved"]),
    ],
)
def test_an_option_with_several_values_may_be_given_several_times(
    words: list[str], profiles: list[str], tmp_path: Path
) -> None:
    _, options = parse("estimate", words, folder=tmp_path, environ={"AUTOBATCH_PROFILE": "saved"})
    assert options.search.profile == profiles


@pytest.mark.parametrize(
    ("words", "option", "value"),
    [
        (["--storage=-x"], "storage", "-x"),
        (["--out", "-"], "out", "-"),
        (["--storage", "a=b"], "storage", "a=b"),
    ],
)
def test_a_value_may_begin_with_a_dash(words: list[str], option: str, value: str, tmp_path: Path) -> None:
    assert parsed(tmp_path, *words)[1].by_name()[option] == value


@pytest.mark.parametrize("words", [["a:b", "--json"], ["--json", "a:b"], ["--json", "--", "a:b"]])
def test_the_workload_may_stand_anywhere(words: list[str], tmp_path: Path) -> None:
    workload, options = parse("probe", words, folder=tmp_path, environ={})
    assert (workload, options.output.json) == ("a:b", True)


@pytest.mark.parametrize("name", RUNNING)
def test_the_help_is_one_screen_of_common_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = help_text(name, "--help", capsys)
    assert len(out.splitlines()) <= 40
    assert max(map(len, out.splitlines())) <= 80
    fields = fields_of(name)
    assert group_of(out).keys() == {option for option, field in fields.items() if field.about.common}
    assert ("(required)" in out) == any(name in field.about.required_by for field in fields.values())


def test_fit_has_few_common_options(capsys: pytest.CaptureFixture[str]) -> None:
    shown = group_of(help_text("fit", "--help", capsys))
    assert 14 <= len(shown) <= 18
    assert {"target_batch", "steps", "memory_budget", "device", "resume", "trials", "out"} <= shown.keys()


@pytest.mark.parametrize("name", RUNNING)
def test_help_all_explains_every_option_in_its_group(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = help_text(name, "--help-all", capsys)
    assert max(map(len, out.splitlines())) <= 80
    fields = fields_of(name)
    titles = {"ranks": "devices", "device": "devices", "train": "training", "tune": "tuning"}
    assert group_of(out) == {
        option: titles.get(field.section, field.section) for option, field in fields.items()
    }
    for option, field in fields.items():
        assert "".join(field.about.text.split()) in "".join(out.split()), option
        assert field.about.text.endswith("."), option


def test_the_help_shows_defaults_and_their_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(help_text("fit", "--help", capsys).split())
    assert "(default: 1800.0)" in " ".join(help_text("fit", "--help-all", capsys).split())
    assert "None" not in text
    (tmp_path / "autobatch.toml").write_text("trials = 3\n")
    text = " ".join(help_text("fit", "--help", capsys, AUTOBATCH_TARGET_BATCH="64").split())
    assert "(default: 3, from trials in autobatch.toml)" in text
    assert "(default: 64, from AUTOBATCH_TARGET_BATCH)" in text
    assert "(required)" not in text
