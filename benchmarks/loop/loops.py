"""The work of the loop benchmark, and who does it: a loop by hand, and autobatch in its ways.

Each function returns one that takes an optimizer step over `ACCUMULATION` micro-batches.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import autobatch
from autobatch import Workload
from autobatch.device.base import SilentMeter
from autobatch.device.cpu import CpuDevice
from autobatch.planning import make_plan
from autobatch.step.train_state import StepSettings, build_train_state
from autobatch.training.loop import Loop
from autobatch.training.metrics import Metrics, RunTotals
from autobatch.workload.feed import Feed, MicroBatches
from autobatch.workload.order import GlobalBatchSampler
from autobatch.workload.split import Split

ACCUMULATION = 4
ENDLESS = 10**9
"""Optimizer steps of a run that the benchmark never reaches."""
Step = Callable[[], object]


class Transformer(nn.Module):
    """Four layers of width 256 over 128 positions."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)
        self.embed = nn.Embedding(256, 256)
        self.body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 256)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids)))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())


class Case(NamedTuple):
    """A model, its samples, and the work of a segment."""

    model: Callable[[], nn.Module]
    data: TensorDataset
    micro_batch: int
    steps: int
    """Optimizer steps of each segment."""
    fewer: int
    """Divides the number of segments."""


CASES = {
    "mlp": Case(
        perceptron, TensorDataset(torch.randn(8192, 64), torch.randint(10, (8192,))), 32, steps=20, fewer=1
    ),
    "transformer": Case(
        Transformer,
        TensorDataset(torch.randint(256, (512, 128)), torch.randint(256, (512, 128))),
        4,
        steps=1,
        fewer=10,
    ),
}


@dataclass(frozen=True)
class Made:
    """Micro-batches that were made before: a sample is its index, and collating picks a whole micro-batch."""

    micro_batches: list[Any]
    size: int

    def __len__(self) -> int:
        return len(self.micro_batches) * self.size

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices

    def collate(self, indices: list[int]) -> Any:
        return self.micro_batches[indices[0] // self.size]


class Work(NamedTuple):
    """What a loop has to do."""

    case: Case
    is_made: bool
    """Whether micro-batches were made before, or are joined from samples."""
    precision: str
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    max_grad_norm: float | None
    """Clip each step, and read its loss, as people do; None for neither."""

    def context(self) -> AbstractContextManager[object]:
        is_mixed = self.precision == "bf16"
        return torch.autocast("cpu", dtype=torch.bfloat16) if is_mixed else nullcontext()

    def model(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = self.case.model()
        return model, self.optimizer(model.parameters())

    def loader(self, **options: Any) -> Iterable[Any]:
        return DataLoader(self.case.data, batch_size=self.case.micro_batch, drop_last=True, **options)

    def batches(self) -> Iterable[Any]:
        """Return the micro-batches of an epoch."""
        return list(self.loader()) if self.is_made else self.loader(shuffle=True)

    def stream(self) -> Iterator[Any]:
        """Yield micro-batches without end, as loops written by hand do."""
        batches = self.batches()
        while True:
            yield from batches

    def workload(self) -> Workload:
        """Return what autobatch is given."""
        made = Made(list(self.loader()), self.case.micro_batch) if self.is_made else None
        return Workload(
            model=self.case.model,
            train_data=self.case.data if made is None else made,
            collate=None if made is None else made.collate,
            loss=loss_of,
            optimizer=lambda parameters, _: self.optimizer(parameters),
            learning_rate=1e-3,
        )


def by_hand(work: Work) -> Step:
    """Take a step as people write it: clip, and read the loss; without clipping, neither."""
    model, optimizer = work.model()
    data, context, max_norm = work.stream(), work.context, work.max_grad_norm

    def step() -> None:
        total = torch.zeros(())
        for _ in range(ACCUMULATION):
            with context():
                loss = loss_of(model, next(data)) / ACCUMULATION
            loss.backward()
            if max_norm is not None:
                total += loss.detach()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if max_norm is not None:
            total.item()

    return step


def by_fit(work: Work) -> Step:
    """Run the loop of `autobatch.fit`, with the line of each step and the totals of the run."""
    case, workload = work.case, work.workload()
    settings = StepSettings(precision=work.precision, max_grad_norm=work.max_grad_norm)  # type: ignore[arg-type]
    cpu = torch.device("cpu")
    run = Loop(
        workload=workload,
        train_state=build_train_state(workload, workload.model(), cpu, settings, learning_rate=1e-3),
        sampler=GlobalBatchSampler(
            samples=len(case.data), target_batch=ACCUMULATION * case.micro_batch, seed=0, steps=ENDLESS
        ),
        device=CpuDevice(memory_budget="1GiB"),
        meter=SilentMeter(),
        micro_batch=case.micro_batch,
        split=Split(),
        feed=Feed(MicroBatches(workload, None), Split()),
    ).run()
    lines = Metrics(Path(tempfile.mkdtemp()) / "metrics.jsonl")
    totals = RunTotals()

    def step() -> None:
        record = next(run)
        lines.step(record)
        totals.add(record)

    return step


def by_batches(work: Work) -> Step:
    """Run a loop of one's own with `autobatch.batches`."""
    model, optimizer = work.model()
    size = work.case.micro_batch
    plan = make_plan(target_batch=ACCUMULATION * size, micro_batch_limit=size, learning_rate=1e-3)
    batches = iter(autobatch.batches(work.workload(), plan, optimizer=optimizer, steps=ENDLESS))

    def step() -> None:
        batch = next(batches)
        for micro in batch:
            with work.context():
                loss = loss_of(model, micro.data)
            batch.backward(loss)
        batch.step(max_grad_norm=work.max_grad_norm)

    return step
