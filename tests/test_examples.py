"""The examples run as a user runs them."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tests.support import gallery
from tests.support.libraries import installed
from tests.support.rank_server import RankServer
from tests.support.sample_run import a_run, a_step

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(folder: Path, *command: str) -> str:
    environ = os.environ | {
        "PYTHONPATH": str(EXAMPLES.parent),
        "OMP_NUM_THREADS": "1",
        "AUTOBATCH_HOME": str(folder / "home"),
    }
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.program
def test_the_own_loop_takes_exact_batches(runner: RankServer, tmp_path: Path) -> None:
    printed = runner.script(EXAMPLES / "own_loop.py", tmp_path)
    samples = [int(one) for one in re.findall(r"^step \d+: (\d+) samples", printed, re.MULTILINE)]
    assert samples[:-1] == [256] * (len(samples) - 1)
    assert sum(samples) == 2000, "two epochs of 1,000 samples"
    losses = [float(one) for one in re.findall(r"loss ([\d.]+)$", printed, re.MULTILINE)]
    assert losses[-1] < losses[0]


def test_a_sink_hands_known_numbers_to_a_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tracker is a stand-in with the calls of its documentation."""
    seen: dict[str, object] = {}

    class AimRun(dict):  # type: ignore[type-arg]
        def __init__(self, experiment: str) -> None:
            super().__init__()
            seen["run"] = self

        def track(self, value: float, name: str, step: int) -> None:
            seen[name] = (step, value)

        def close(self) -> None:
            seen["summary"] = dict(self)

    monkeypatch.setitem(sys.modules, "aim", SimpleNamespace(Run=AimRun))
    spec = importlib.util.spec_from_file_location("example_sinks", EXAMPLES / "sinks.py")
    assert spec is not None
    assert spec.loader is not None
    sinks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sinks)
    sink = sinks.AimSink("p")
    sink.step(a_step(3, validation={"accuracy": 0.9, "x": None}))
    sink.end(a_run().training)
    sink.close()
    assert (seen["held_out/accuracy"], seen["micro_batch"]) == ((3, 0.9), (3, 86))
    assert "held_out/x" not in seen
    assert seen["summary"]["training"]["optimizer_steps"] == 120  # type: ignore[index]


LONGEST = 80
ADDED = "  # +"
"""Mark of the lines that a script of a library has more with autobatch."""
LIBRARIES = {
    "hf_trainer": ("transformers", r"Trainer: .*batch 64 in \d+ micro-batches.*after 8 steps"),
    "lightning_module": ("lightning", r"Lightning: .*batch 256 in \d+ micro-batches; 8 steps"),
    "accelerate_loop": ("accelerate", r"accelerate: .*batch 256 in \d+ micro-batches.*8 steps"),
}
TRAINED = r"in (about )?[\d.]+ micro-batches.*trained +20 steps"
OWN = {
    "streaming": r"5,120 samples.*7,680 samples",
    **dict.fromkeys(
        ("nanogpt", "imagenet", "mae", "clip", "lora", "gin", "diffusion", "dino", "detr"), TRAINED
    ),
    "dcgan": r"batch 128 in [2-9] micro-batches.*step 9, judge.*step 9, fool",
}


@pytest.mark.program
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_script_of_a_library_is_planned_and_trained(name: str, runner: RankServer, tmp_path: Path) -> None:
    library, expected = LIBRARIES[name]
    installed(library)
    said = runner.script(EXAMPLES / f"{name}.py", tmp_path)
    assert all(re.search(part, said, re.DOTALL) for part in expected.split("; "))


@pytest.mark.program
@pytest.mark.parametrize("name", OWN)
def test_a_program_of_the_gallery_trains_in_micro_batches(
    name: str, runner: RankServer, tmp_path: Path
) -> None:
    assert re.search(OWN[name], runner.script(EXAMPLES / f"{name}.py", tmp_path), re.DOTALL)


@pytest.mark.program
def test_the_centre_of_dino_is_that_of_all_ranks(tmp_path: Path) -> None:
    """Two ranks, of which each sees other samples, end with the weights of one process."""
    counts = ("--target-batch", "101", "--max-micro-batch", "16", "--steps", "3", "--trials", "0")
    words = (*counts, "--workers", "1", "--device", "cpu", "--split-check", "off")
    found = {}
    for ranks in ("1", "2"):
        more = (*words, "--ranks", ranks, "--out", ranks)
        run(tmp_path, "-m", "autobatch", "fit", f"{EXAMPLES / 'dino.py'}:workload", *more)
        found[ranks] = load_file(tmp_path / ranks / "model.safetensors")
    assert found["1"]["centre"].abs().max() > 1e-3
    for name, value in found["1"].items():
        torch.testing.assert_close(found["2"][name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST


def test_every_example_runs_in_a_test() -> None:
    run_here = {*LIBRARIES, *OWN, "train", "own_loop", "sinks"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == run_here


@pytest.mark.parametrize("name", ["hf_trainer", "lightning_module"])
def test_a_script_of_a_library_has_at_most_three_lines_more(name: str) -> None:
    lines = (EXAMPLES / f"{name}.py").read_text().splitlines()
    added = [line for line in lines if line.endswith(ADDED)]
    assert 1 <= len(added) <= 3
    rest = "\n".join(line for line in lines if line not in added)
    names = {node.id for node in ast.walk(ast.parse(rest)) if isinstance(node, ast.Name)}
    assert "autobatch" not in names, "without these lines it is the library's own script"


@pytest.mark.program
@pytest.mark.parametrize(
    "name",
    ["nanogpt", "imagenet", "imagenet in groups", "mae", "clip", "lora", "gin", "diffusion", "dino", "detr"],
)
def test_a_program_of_the_gallery_is_exact(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle is a loop of torch over whole batches in float64. BatchNorm is what is not exact."""
    monkeypatch.setenv("AUTOBATCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    off = gallery.distance(name.partition(" ")[0], tmp_path / "run", norm=name.endswith("groups"))
    assert off > 1e-3 if name == "imagenet" else off <= 1e-12


def test_the_gallery_has_the_lines_that_are_marked_and_no_others_name_autobatch() -> None:
    page = (EXAMPLES.parent / "docs/figures.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[.+?\]\(\.\./examples/(\w+)\.py\) \| .+? \| (\d+) \|", page, re.MULTILINE)
    assert {name for name, _ in rows} == {*OWN} - {"streaming"}
    for name, promised in rows:
        lines = (EXAMPLES / f"{name}.py").read_text().splitlines()
        assert sum(line.endswith(ADDED) for line in lines) == int(promised)
        used = re.compile(r"autobatch|\b(Loss|Workload|fit)\(")
        assert not any(used.search(line) and not line.endswith(ADDED) for line in lines)
