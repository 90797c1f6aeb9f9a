"""The words of a command: how they are read, and what the help shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autobatch.cli.main import RUNNING
from autobatch.cli.parser import TITLES, parse
from autobatch.core.options import fields_of


@pytest.fixture(autouse=True)
def a_screen_of_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def parsed(folder: Path, *words: str, **environ: str) -> Any:
    return parse("fit", ["--target-batch", "8", *words], folder=folder, environ=environ)[1]


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
    options = parsed(tmp_path, "--lr_rule", "linear", "--base-batch=4")
    assert (options.device.memory_budget, options.search.max_micro_batch) == ("6GiB", 4)
    assert (options.batch.lr_rule, options.batch.base_batch) == ("linear", 4)


def test_a_switch_can_be_taken_back(tmp_path: Path) -> None:
    (tmp_path / "autobatch.toml").write_text("json = true\nquiet = true\n")
    options = parsed(tmp_path, "--no-json")
    assert (options.output.json, options.output.quiet, options.train.resume) == (False, True, False)
    assert parsed(tmp_path, "--json", "--resume", AUTOBATCH_QUIET="false").output.quiet is False


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
        (["--study", "-x"], "study", "-x"),
        (["--study=-x"], "study", "-x"),
        (["--study", "--my_study"], "study", "--my_study"),
        (["--out", "-"], "out", "-"),
        (["--study", "a=b"], "study", "a=b"),
        (["--study", ""], "study", ""),
    ],
)
def test_a_value_may_begin_with_a_dash(words: list[str], option: str, value: str, tmp_path: Path) -> None:
    assert parsed(tmp_path, *words).by_name()[option] == value


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
    assert group_of(out) == {option: TITLES[field.section] for option, field in fields.items()}
    for option, field in fields.items():
        assert "".join(field.about.text.split()) in "".join(out.split()), option
        assert field.about.text.endswith("."), option


def test_the_help_shows_defaults_and_their_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(help_text("fit", "--help", capsys).split())
    assert "(default: 10)" in " ".join(help_text("fit", "--help-all", capsys).split())
    assert "None" not in text
    (tmp_path / "autobatch.toml").write_text("trials = 3\n")
    text = " ".join(help_text("fit", "--help", capsys, AUTOBATCH_TARGET_BATCH="64").split())
    assert "(default: 3, from trials in autobatch.toml)" in text
    assert "(default: 64, from AUTOBATCH_TARGET_BATCH)" in text
    assert "(required)" not in text
