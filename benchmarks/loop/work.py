"""The work of the loop benchmark, a loop by hand for it, and a training that takes its steps in segments."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from autobatch import Workload

ACCUMULATION = 4
ENDLESS = 10**9
"""Optimizer steps of a run that the benchmark never reaches."""
Segment = Callable[[], object]
"""Takes some optimizer steps."""


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
    """A model, its samples, and the optimizer steps of each segment."""

    model: Callable[[], nn.Module]
    data: TensorDataset
    micro_batch: int
    steps: int


CASES = {
    "mlp": Case(perceptron, TensorDataset(torch.randn(8192, 64), torch.randint(10, (8192,))), 32, 20),
    "transformer": Case(
        Transformer, TensorDataset(torch.randint(256, (512, 128)), torch.randint(256, (512, 128))), 4, 1
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

    def stream(self) -> Iterator[Any]:
        """Yield micro-batches without end, as loops written by hand do."""
        batches = list(self.loader()) if self.is_made else self.loader(shuffle=True)
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

    def segment(self, step: Callable[[], object]) -> Segment:
        """Return what takes so many steps as a segment has."""
        return lambda: [step() for _ in range(self.case.steps)]


def by_hand(work: Work) -> Segment:
    """Take steps as people write them: clip, and read the loss; without clipping, neither."""
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

    return work.segment(step)


class Paced:
    """A training in a thread of its own, which waits after each segment of steps.

    Args:
        steps: of a segment.
        train: trains without end, and calls what it is given after each step.
    """

    def __init__(self, steps: int, train: Callable[[Callable[..., None]], object]) -> None:
        self._steps, self._count, self._error = steps, 0, None
        self._may_go, self._is_done = threading.Semaphore(0), threading.Semaphore(0)

        def run() -> None:
            try:
                train(self._stepped)
            except BaseException as error:
                self._error = error
            finally:
                self._is_done.release()

        threading.Thread(target=run, daemon=True).start()
        self._wait()

    def _stepped(self, *_: object) -> None:
        self._count += 1
        if self._count % self._steps == 0:
            self._is_done.release()
            self._may_go.acquire()

    def _wait(self) -> None:
        self._is_done.acquire()
        if self._error is not None:
            raise self._error

    def __call__(self) -> None:
        """Let the training take a segment."""
        self._may_go.release()
        self._wait()
