"""A user's typed loop around `autobatch.batches`, as a type checker reads it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import autobatch

CLIENT = """
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import autobatch


class Pairs(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(3), index


def collate(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    return torch.stack([row for row, _ in samples]), torch.tensor([label for _, label in samples])


def loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(data[0]), data[1])


def workload() -> autobatch.Workload:
    return autobatch.Workload(
        model=lambda: nn.Linear(3, 2),
        train_data=[(torch.zeros(3), 0)],
        loss=loss,
        optimizer=lambda params, rate: (torch.optim.SGD(params, lr=rate), torch.optim.SGD(params, lr=rate)),
        learning_rate=0.1,
        collate=collate,
    )


def train(plan: autobatch.Plan, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for batch in autobatch.batches(Pairs(), plan, epochs=3, collate=collate):
        for micro in batch:
            reveal_type(micro.data)
            batch.backward(loss(model, micro.data))
        reveal_type(batch.step(optimizer, max_grad_norm=1.0).loss)
    for whole in autobatch.batches(DataLoader(Pairs()), plan, steps=3, optimizer=[optimizer]):
        for part in whole:
            reveal_type(part.samples)
            whole.backward(autobatch.Loss(model(part.data[0]).sum(), len(part)))
        whole.step()
    autobatch.batches(Pairs(), plan, epoch=3)
    autobatch.batches(Pairs(), plan, epochs="3")
    autobatch.batches(3, plan)
    batch.backwards(1)
"""


@pytest.mark.slow
def test_a_type_checker_infers_the_loop_and_refuses_mistakes(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "client.py").write_text(CLIENT)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "client.py"],
        cwd=tmp_path,
        env={"MYPYPATH": str(Path(autobatch.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.findall(r'Revealed type is "(.*)"', done.stdout) == [
        "tuple[torch._tensor.Tensor, torch._tensor.Tensor]",
        "float",
        "int",
    ], done.stdout + done.stderr
    lines = CLIENT.splitlines()
    wrong = {lines[int(number) - 1].strip() for number in re.findall(r"client\.py:(\d+): error", done.stdout)}
    assert wrong == {
        "autobatch.batches(Pairs(), plan, epoch=3)",
        'autobatch.batches(Pairs(), plan, epochs="3")',
        "autobatch.batches(3, plan)",
        "batch.backwards(1)",
    }, done.stdout
