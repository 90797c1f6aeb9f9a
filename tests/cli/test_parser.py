"""The words of a command, config files and variables: how they are read, which wins, and what help shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from autobatch import InputError
from autobatch.cli.parser import HelpAsked, parse
from autobatch.core.options import COMMANDS, Options, fields_of


def parsed(*words: str, command: str = "fit") -> tuple[str | None, Options]:
    target = ("--target-batch", "8") if command == "fit" else ()
    return parse(command, "run it", [*target, *words])


def test_the_command_line_wins_over_the_file() -> None:
    Path("pyproject.toml").write_text('[tool.autobatch]\nsteps = 2\ntrials = 3\nworkload = "a:b"\n')
    workload, options = parsed()
    assert (workload, options.steps, options.trials) == ("a:b", 2, 3)
    Path("autobatch.toml").write_text('steps = 3\nkeep_last = 9\nworkload = "c:d"\n')
    workload, options = parsed()
    assert (workload, options.steps, options.trials) == ("c:d", 3, None), "it replaces the whole table"
    workload, options = parsed("e:f", "--steps", "5")
    assert (workload, options.steps, options.keep_last) == ("e:f", 5, 9)
    options = parsed("--epochs", "2")[1]
    assert (options.steps, options.epochs) == (None, 2)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("autobatch.toml", "stpes = 3", r"there is no option stpes; did you mean steps\?"),
        ("autobatch.toml", "steps = ", "is not TOML"),
        ("autobatch.toml", "steps = true", "steps in .* must be a whole number of 1 or more, found True"),
        ("autobatch.toml", "workload = 3", "workload in .* must be file.py"),
        ("autobatch.toml", "memory_budget = 'lots'", "memory_budget in .*: 'lots' is not a size in bytes"),
        ("autobatch.toml", "micro_batch = 'all'", "micro_batch in .* must be a whole number of 1 or more"),
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


@pytest.mark.parametrize(
    ("command", "words", "option", "value"),
    [
        ("estimate", ["--profile", "a", "--profile=b", "--profile", "c", "d"], "profile", [*"abcd"]),
        ("estimate", ["--json"], "profile", ["saved"]),
        ("fit", ["--log", "wandb", "a:b", "--log", "mlflow"], "log", ["wandb", "mlflow"]),
        ("fit", ["--out=-x"], "out", "-x"),
        ("fit", ["--out", "-"], "out", "-"),
        ("fit", ["--json", "--no-json"], "json", False),
    ],
)
def test_words_may_stand_anywhere(command: str, words: list[str], option: str, value: object) -> None:
    Path("autobatch.toml").write_text("profile = 'saved'")
    workload, options = parsed(*words, command=command)
    assert options.by_name()[option] == value
    assert workload == ("a:b" if "a:b" in words else None)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_one_screen_and_help_all_has_every_option(name: str) -> None:
    for word in ("--help", "--help-all"):
        with pytest.raises(HelpAsked) as asked:
            parse(name, "run it on GPUs", [word])
        lines = str(asked.value).splitlines()
        assert len(lines) <= (80 if word == "--help-all" else 45)
        assert lines[2] == "Run it on GPUs."
        assert max(map(len, lines)) <= 80
        wanted = [field for field in fields_of(name).values() if word == "--help-all" or not field.rare]
        listed = [line.split()[0] for line in lines if line.startswith("  --")]
        assert sorted(listed) == sorted(f"--{field.name.replace('_', '-')}" for field in wanted)
        assert all("".join(field.text.split()) in "".join("".join(lines).split()) for field in wanted)
