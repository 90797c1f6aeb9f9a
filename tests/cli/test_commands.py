"""The commands that run no workload: profiles, report and doctor."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import msgspec
import pytest
import torch

from autobatch.cli.commands import HELP, compare, doctor, profiles, report, this_gpu
from autobatch.core.errors import InputError
from tests.support.sample_run import a_run, a_step

COMMANDS = {"profiles": profiles, "report": report, "compare": compare, "doctor": doctor}


@pytest.fixture(autouse=True)
def a_home_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOBATCH_HOME", str(tmp_path / "home"))


def said(name: str, *words: str) -> str:
    lines: list[str] = []
    assert COMMANDS[name](list(words), lines.append) == 0
    return "\n".join(lines)


@pytest.mark.parametrize("name", HELP)
@pytest.mark.parametrize("word", ["-h", "--help", "--help-all"])
def test_the_help_is_short(name: str, word: str) -> None:
    text = said(name, word)
    assert text.startswith(f"usage: autobatch {name}")
    assert text.count("\n") < 40
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("name", HELP)
def test_unknown_options_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"there is no option --foo; see autobatch {name} --help"):
        said(name, "--foo")


def test_profiles_are_listed_with_their_memory() -> None:
    lines = said("profiles").splitlines()
    assert lines == said("profiles", "list").splitlines()
    listed = json.loads(said("profiles", "list", "--json"))["profiles"]
    assert len(lines) - 2 == len(listed) >= 15  # below a head, above a remark
    (line,) = [line for line in lines if line.startswith("t4 ")]
    assert "GiB" in line
    assert " 7.5 " in line
    assert line.endswith("NVIDIA T4")


def test_a_profile_is_shown_as_toml_and_as_json() -> None:
    assert 'name = "t4"' in said("profiles", "show", "t4")
    assert json.loads(said("profiles", "show", "t4", "--json"))["name"] == "t4"
    with pytest.raises(InputError, match="no profile 'nope'"):
        said("profiles", "show", "nope")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can be saved")
def test_a_profile_is_saved_only_with_a_gpu() -> None:
    with pytest.raises(InputError, match="needs a CUDA GPU, and torch finds none"):
        this_gpu("mine")


@pytest.mark.usefixtures("no_pictures")
def test_the_report_of_a_run_is_written_again(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_bytes(msgspec.json.encode(a_run()))
    path = tmp_path / "report.html"
    assert said("report", str(tmp_path)) == str(path)
    assert "1,024 samples" in path.read_text()
    assert json.loads(said("report", str(tmp_path), "--json")) == {"report": str(path)}
    with pytest.raises(InputError, match="found 2: write report runs/NAME/DATE"):
        said("report", str(tmp_path), "more")


@pytest.mark.usefixtures("no_pictures")
def test_the_newest_run_is_taken_if_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="there is no run in runs: give the folder of a run"):
        said("report")
    folder = tmp_path / "runs" / "small" / "20261121"
    folder.mkdir(parents=True)
    (folder / "result.json").write_bytes(msgspec.json.encode(a_run()))
    assert said("report") == said("report", "runs") == "runs/small/20261121/report.html"


def test_the_doctor_prints_lines_or_one_object(tmp_path: Path) -> None:
    found = json.loads(said("doctor", "--json"))
    assert {"schema", "autobatch", "host", "cuda", "nvml", "versions", "home", "missing"} <= found.keys()
    assert found["home"] == str(tmp_path / "home")
    assert found["versions"]["torch"] == version("torch")
    assert f"home     {tmp_path / 'home'}" in said("doctor").splitlines()


def test_a_report_of_figures_that_no_float_holds_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_bytes(msgspec.json.encode(a_run()))
    row = msgspec.to_builtins(a_step(1)) | {"micro_batch": 10**310, "samples": 10**310}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row), encoding="utf-8")
    with pytest.raises(InputError, match="a figure of the run is out of range: int too large to convert"):
        said("report", str(tmp_path))


def test_runs_are_printed_side_by_side(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_bytes(msgspec.json.encode(a_run()))
    words = (str(tmp_path / "a"), str(tmp_path / "b"))
    lines = said("compare", *words).splitlines()
    (held_out,) = [line for line in lines if line.startswith("held-out accuracy")]
    assert held_out.split()[-4:] == ["93.12", "%", "93.12", "%"]
    assert (tmp_path / "b" / "compare.html").exists()
    found = json.loads(said("compare", *words, "--json"))
    assert found["runs"][words[0]]["batch"] == "1,024"
    with pytest.raises(InputError, match="compare takes the folders of two or more runs, found 1"):
        said("compare", words[0])
    with pytest.raises(InputError, match=r"compare takes two or more different runs, found .*a only"):
        said("compare", words[0], f"{words[0]}/.")
