"""The commands that run no workload: profiles, report, compare and doctor."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import msgspec
import pytest
import torch

from autobatch import InputError
from autobatch.cli.commands import HELP, answer, doctor_lines, examine
from autobatch.core.units import GiB
from autobatch.device.cuda_gpus import VisibleGpu
from tests.support.sample_run import a_run, a_step


@pytest.fixture(autouse=True)
def a_home_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOBATCH_HOME", str(tmp_path / "home"))


def said(name: str, *words: str) -> str:
    return answer(name, list(words))


@pytest.mark.parametrize("name", HELP)
def test_the_help_is_short_and_unknown_options_are_refused(name: str) -> None:
    for word in ("-h", "--help", "--help-all"):
        text = said(name, word)
        assert text.startswith(f"usage: autobatch {name}")
        assert text.count("\n") < 40
        assert max(map(len, text.splitlines())) <= 80
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
        said("profiles", "save", "mine")


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
    assert found["cuda"]["available"] == torch.cuda.is_available()
    assert (found["cuda"]["built_for"] is None) == any("built without" in one for one in found["missing"])
    assert found["nvml"]["available"] != any(one.startswith("NVML: ") for one in found["missing"])
    assert f"home     {tmp_path / 'home'}" in said("doctor").splitlines()


def test_the_doctor_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    old = VisibleGpu(index=1, name="V100", uuid=None, total_bytes=16 * GiB, free_bytes=None, capability="7.0")
    new = msgspec.structs.replace(old, index=0, capability="9.0")
    monkeypatch.setattr("autobatch.device.cuda_gpus.visible_gpus", lambda: [new, old])
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90"])
    missing = examine()["missing"]
    assert missing[0].startswith("a CUDA GPU that torch can use")
    (line,) = [one for one in missing if one.startswith("kernels: ")]
    assert line.startswith("kernels: cuda:1 has compute capability 7.0, and torch ")


def test_the_lines_name_the_gpu_the_holders_and_the_versions() -> None:
    gpu = {"name": "NVIDIA L4", "free_bytes": 20 * GiB}
    visible = {**gpu, "index": 1, "total_bytes": 22 * GiB, "capability": "8.9"}
    holders = [{"pid": 7, "name": None, "used_bytes": 2 * GiB}]
    memory = {"available_bytes": 3 * GiB, "total_bytes": 4 * GiB, "source": "cgroup"}
    findings = {
        "host": {"name": "AMD EPYC", "cores": 8, **memory},
        "cuda": {"available": True, "built_for": "13.0", "gpus": [visible]},
        "nvml": {"available": True, "gpus": [{**gpu, "holders": holders}]},
        "versions": {"python": "3.12.4", "torch": "2.13.0", "tensorboard": None},
        "home": "/home/me/autobatch",
        "missing": ["a driver"],
    }
    assert doctor_lines(findings) == [
        "host     AMD EPYC, 8 cores",
        "memory   3.00 GiB available of 4.00 GiB (cgroup)",
        "cuda     torch built for CUDA 13.0",
        "         cuda:1 NVIDIA L4, 22.0 GiB, 20.0 GiB free, cc 8.9",
        "nvml     available",
        "         NVIDIA L4: 20.0 GiB free",
        "           process 7  2.00 GiB",
        "versions python 3.12.4, torch 2.13.0",
        "home     /home/me/autobatch",
        "missing  a driver",
    ]


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
