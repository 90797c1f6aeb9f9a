"""The commands that run no workload, such as profiles, compare and doctor."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
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
from tests.support.sample_run import a_device, a_run

Said = Callable[..., str]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """Run a command; return what it prints, or its message if it is refused."""

    def run(*words: object, code: int = 0) -> str:
        assert cli.run([str(word) for word in words]) == code
        out, err = capsys.readouterr()
        assert (err if code == 0 else out) == ""
        return (out if code == 0 else err).removesuffix("\n")

    return run


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
    assert line.split()[2:] == ["GiB", "7.5", "NVIDIA", "T4"]
    assert 'name = "t4"' in said("profiles", "show", "t4")
    assert json.loads(said("profiles", "show", "t4", "--json"))["name"] == "t4"


def test_runs_are_compared_with_what_differs(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, dict[str, Any]] = {
        "1": {"title": "bert"},
        "2": {
            "options": {"steps": 60, "seed": 0, "out": "x"},
            "plan": msgspec.structs.replace(a_run().plan, precision="fp32"),
            "versions": {"torch": "2.12.0", "python": "3.12.4"},
        },
        "3": {"options": {"seed": 0, "out": "y"}, "device": a_device(name="NVIDIA L4")},
    }
    for name, change in changes.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_bytes(msgspec.json.encode(a_run(**change)))
    lines = said("compare", "2", "3").splitlines()
    assert lines[0].split() == ["2", "3"]
    rows = [line.split("  ")[0] for line in lines]
    differing = rows[rows.index("differs") + 1 : rows.index("planned and reached")]
    assert differing == ["device", "torch", "--steps", "autobatch", "driver"]
    (reached,) = [line for line in lines if line.startswith("reached")]
    assert reached.count("held-out accuracy 93.12 %") == 2
    for width in (80, 40):
        monkeypatch.setattr("autobatch.cli.commands.terminal_width", lambda width=width: width)
        folded = said("compare", "2", "3").splitlines()
        lines_of_both = [*folded, *said("profiles").splitlines()]
        assert max(len(line) for line in lines_of_both if "runs/" not in line) <= width, "but for paths"
        assert not Counter("".join("".join(lines).split())) - Counter("".join(folded)), "nothing is cut"
    found = json.loads(said("compare", "1", "3", "--json"))
    assert {"workload", "device"} <= set(found["differs"])
    bert = found["runs"]["1"]
    assert bert["plan"].startswith("batch 1,024 in 12 micro-batches")
    assert bert["--seed"] == "", "not set"


def test_the_doctor_prints_this_machine_as_an_outline_or_as_one_object(
    own_home: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autobatch.device import host

    found = json.loads(said("doctor", "--json"))
    assert {"schema", "autobatch", "host", "cuda", "nvml"} <= found.keys()
    assert (found["home"], found["versions"]["torch"]) == (str(own_home), version("torch"))
    assert (found["cuda"]["built_for"] is None) == any("built without" in line for line in found["missing"])
    assert found["nvml"]["available"] != any(line.startswith("NVML: ") for line in found["missing"])
    new = {"index": 0, "name": "V100", "uuid": "1", "total_bytes": 22 * GiB, "capability": "9.0"}
    holder = host.MemoryHolder(pid=7, name=None, used_bytes=2 * GiB)
    gpu = host.NvmlGpu(
        uuid="GPU-1", name="NVIDIA L4", free_bytes=20 * GiB, used_bytes=2 * GiB, holders=[holder]
    )
    for place, value in {
        "autobatch.device.cuda.visible_gpus": [new, new | {"index": 1}],
        "autobatch.device.host.read_gpus": [gpu],
        "torch.cuda.is_available": False,
    }.items():
        monkeypatch.setattr(place, lambda *_, value=value: value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    lines = [" ".join(line.split()) for line in said("doctor").splitlines()]
    assert lines.count("total 22.0 GiB") == 2
    at = lines.index("holders")
    assert lines[at + 1 : at + 3] == ["pid 7", "used 2.00 GiB"]
    assert any(line.startswith("missing a CUDA GPU that torch can use: check the driver") for line in lines)
