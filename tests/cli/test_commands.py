"""The commands that run no workload, such as profiles, report, compare and doctor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from autobatch.cli import main as cli
from autobatch.core.options import fields_of
from autobatch.core.units import GiB
from tests.support.planted import PLANTED
from tests.support.sample_run import a_device, a_run

Said = Callable[..., str]


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Said:
    """Run a command with a home of its own; return what it prints, or its message if it is refused."""
    monkeypatch.setenv("AUTOBATCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    def run(*words: object, code: int = 0) -> str:
        assert cli.run([str(word) for word in words]) == code
        out, err = capsys.readouterr()
        assert (err if code == 0 else out) == ""
        return (out if code == 0 else err).removesuffix("\n")

    return run


def a_folder(path: Path, **changes: Any) -> Path:
    """Write a run to a folder."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "result.json").write_bytes(msgspec.json.encode(a_run(**changes)))
    return path


@pytest.mark.parametrize("name", cli.OTHER)
def test_the_help_is_short_and_unknown_options_are_refused(name: str, said: Said) -> None:
    for word in ("-h", "--help", "--help-all"):
        text = said(name, word)
        assert text.startswith(f"usage: autobatch {name}")
        assert "[--json]" in text
        assert text.count("\n") < 40
        assert max(map(len, text.splitlines())) <= 80
    assert f"there is no option --foo; see autobatch {name} --help" in said(name, "--foo", code=2)


def test_a_project_is_begun_where_nothing_is_overwritten(tmp_path: Path, said: Said) -> None:
    assert "cd 'my project' && autobatch fit" in said("init", "my project")
    started = {path.name: path for path in (tmp_path / "my project").iterdir()}
    assert started.keys() == {"train.py", "autobatch.toml"}
    assert set(tomllib.loads(started["autobatch.toml"].read_text())) <= {"workload", *fields_of("fit")}
    started["train.py"].write_text("mine")
    started["autobatch.toml"].unlink()
    assert "train.py exists" in said("init", "my project", code=2)
    assert started["train.py"].read_text() == "mine"
    assert not started["autobatch.toml"].exists()


def test_profiles_are_listed_with_their_memory_and_shown_as_toml_or_json(said: Said) -> None:
    lines = said("profiles").splitlines()
    assert lines == said("profiles", "list").splitlines()
    listed = json.loads(said("profiles", "list", "--json"))["profiles"]
    assert len(lines) - 2 == len(listed) >= 15  # below a head, above a remark
    (line,) = [line for line in lines if line.startswith("t4 ")]
    assert all(part in line for part in ("GiB", " 7.5 "))
    assert line.endswith("NVIDIA T4")
    assert 'name = "t4"' in said("profiles", "show", "t4")
    assert json.loads(said("profiles", "show", "t4", "--json"))["name"] == "t4"
    assert "no profile 'nope'" in said("profiles", "show", "nope", code=2)


def test_planted_texts_of_a_profile_are_shown_harmlessly(tmp_path: Path, said: Said) -> None:
    text = json.dumps(PLANTED).replace("\\u001b", "\\u001B")
    figure = f'value = 8\nunit = "B"\nsource = {text}\ndate = "2026-11-21"\nmeasured = false\n'
    head = f'schema = 1\nname = "p"\ntitle = {text}\nvendor = {text}\ncompute_capability = "8.0"\n'
    (tmp_path / "p.toml").write_text(f"{head}[total]\n{figure}")
    for words in (["show", str(tmp_path / "p.toml")], ["show", str(tmp_path / "p.toml"), "--json"]):
        out = said("profiles", *words)
        assert "alert(1)" in out
        assert all(line.isprintable() for line in out.rstrip("\n").split("\n"))
    assert json.loads(out)["title"] == PLANTED


def test_runs_are_compared_with_what_differs(tmp_path: Path, said: Said) -> None:
    changes: dict[str, dict[str, Any]] = {
        "bert/1": {"title": "bert"},
        "digits/2": {
            "options": {"steps": 60, "seed": 0, "out": "x"},
            "versions": {"torch": "2.12.0", "python": "3.12.4"},
        },
        "digits/3": {"options": {"seed": 0, "out": "y"}, "device": a_device(name="NVIDIA L4")},
    }
    assert "runs has no two runs of the workload that ran last: give RUN RUN" in said("compare", code=2)
    for seconds, (name, change) in enumerate(changes.items()):
        path = a_folder(tmp_path / "runs" / name, **change) / "result.json"
        os.utime(path, (seconds, seconds))
    lines = said("compare").splitlines()
    assert lines[0].split() == ["runs/digits/2", "runs/digits/3"]
    rows = [line.split("  ")[0] for line in lines]
    differing = rows[rows.index("differs") + 1 : rows.index("planned and reached")]
    assert differing == ["device", "autobatch", "driver", "torch", "--steps"]
    (held_out,) = [line.split() for line in lines if line.startswith("held-out accuracy")]
    assert held_out[-4:] == ["93.12", "%", "93.12", "%"]
    found = json.loads(said("compare", "runs/bert/1", "runs/digits/3", "--json"))
    assert {"workload", "device"} <= set(found["differs"])
    assert (found["runs"]["runs/bert/1"]["batch"], found["runs"]["runs/bert/1"]["--seed"]) == (
        "1,024",
        "not set",
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["runs/digits/1"],
            "compare takes two or more different runs, found runs/digits/1 only: give RUN RUN",
        ),
        (["runs/digits/1", "runs/digits/1/."], "two or more different runs, found runs/digits/1 only"),
        (["runs/digits/1", "nothing"], "nothing is not the folder of a run: nothing/result.json cannot be"),
        (["runs/digits/1", "--newest"], "there is no option --newest; see autobatch compare --help"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(
    tmp_path: Path, said: Said, words: list[str], message: str
) -> None:
    a_folder(tmp_path / "runs" / "digits" / "1")
    line = said("compare", *words, code=2)
    assert message in line
    assert "\n" not in line


def test_the_doctor_prints_lines_or_one_object(tmp_path: Path, said: Said) -> None:
    found = json.loads(said("doctor", "--json"))
    assert {"schema", "autobatch", "host", "cuda", "nvml", "versions", "home", "missing"} <= found.keys()
    assert found["home"] == str(tmp_path / "home")
    assert found["versions"]["torch"] == version("torch")
    assert found["cuda"]["available"] == torch.cuda.is_available()
    assert (found["cuda"]["built_for"] is None) == any("built without" in one for one in found["missing"])
    assert found["nvml"]["available"] != any(one.startswith("NVML: ") for one in found["missing"])


def test_the_doctor_names_the_gpus_the_holders_and_what_is_missing(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autobatch.device import nvml

    old = {"index": 1, "name": "V100", "uuid": "1", "total_bytes": 22 * GiB, "capability": "7.0"}
    new = old | {"index": 0, "capability": "9.0"}
    holder = nvml.MemoryHolder(pid=7, name=None, used_bytes=2 * GiB)
    gpu = nvml.NvmlGpu(
        uuid="GPU-1", name="NVIDIA L4", free_bytes=20 * GiB, used_bytes=2 * GiB, holders=[holder]
    )
    for place, value in {
        "autobatch.device.cuda.visible_gpus": [new, old],
        "autobatch.device.nvml.read_gpus": [gpu],
        "torch.cuda.is_available": False,
    }.items():
        monkeypatch.setattr(place, lambda *_, value=value: value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    lines = said("doctor").splitlines()
    versions = next(number for number, line in enumerate(lines) if line.startswith("versions "))
    assert lines[2:versions] == [
        "cuda     torch built for CUDA 13.0",
        "         cuda:0 V100, 22.0 GiB, cc 9.0",
        "         cuda:1 V100, 22.0 GiB, cc 7.0",
        "nvml     available",
        "         NVIDIA L4: 20.0 GiB free",
        "           process 7  2.00 GiB",
    ]
    assert lines[versions + 1] == f"home     {tmp_path / 'home'}"
    assert lines[versions + 2].startswith("missing  a CUDA GPU that torch can use: check the driver")


COMPLETED = {
    "autobatch pro": {"probe", "profiles"},
    "autobatch plan --lr-": {"--lr-rule"},
    "autobatch fit --lr-rule ": {"none", "linear", "sqrt"},
    "autobatch fit --target-batch 8 --precision f": {"fp32", "fp16"},
    "autobatch estimate --profile rtx-409": {"rtx-4090"},
    "autobatch fit trai": {"train.py"},
    "autobatch fit --out ru": {"runs"},
}
"""What a shell offers after some words."""


def test_bash_completes_commands_options_choices_and_paths(tmp_path: Path, said: Said) -> None:
    pytest.importorskip("shtab")
    (tmp_path / "train.py").touch()
    (tmp_path / "runs").mkdir()
    script = said("completion", "bash")
    ask = """
complete -p autobatch >/dev/null || exit 1
while IFS= read -r line; do
    COMP_WORDS=($line); [[ $line == *" " ]] && COMP_WORDS+=("")
    COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 )); COMPREPLY=()
    _shtab_autobatch
    echo "${COMPREPLY[@]}"
done
"""
    done = subprocess.run(
        ["bash", "--norc", "-c", f"{script}\n{ask}"],
        input="".join(f"{line}\n" for line in COMPLETED),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    answers = dict(zip(COMPLETED, done.stdout.splitlines(), strict=True))
    assert {line: set(found.split()) for line, found in answers.items()} == COMPLETED, done.stderr
    assert all(f"--{name.replace('_', '-')}" in script for name in fields_of("fit"))


def test_completion_knows_three_shells_and_refuses_others(
    said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "takes the name of a shell, found 'tcsh'" in said("completion", "tcsh", code=2)
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert "pip install shtab" in said("completion", "bash", code=2)
    monkeypatch.undo()
    pytest.importorskip("shtab")
    assert said("completion", "zsh").startswith("#compdef autobatch")
    assert "complete -c autobatch" in said("completion", "fish")
