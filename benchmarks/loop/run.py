"""The time of the training loop against one written by hand, and against forward, backward and step.

    python -m benchmarks.loop.run [--rounds 400] [--cases mlp transformer]

One process with one thread runs all loops in turn, a short segment of steps each, so that other load on the
machine affects them equally. They run on the GPU if there is one, and copy from pinned memory. Micro-batches
are either made before (``made``), or joined from samples in memory (``joined``; a DataLoader without workers
in the loops by hand).

- ``adam, clipped``: Adam, 4 micro-batches a step, clipping, the loss of each step. The reference is a loop
  written by hand that does the same. autobatch also checks, measures the norm and writes a line.
- ``sgd``: plain SGD without clipping. The reference is ``bare``: forward, backward and step, nothing else.

A figure is the median, over segments, of the ratio to the reference in the same round, for wall time and for
the CPU time of the process. They agree on an idle machine. On a busy one, read the CPU time.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import autobatch
from autobatch import Workload
from benchmarks.report import arguments, markdown, save

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ACCUMULATION = 4
ENDLESS = 10**9
"""Optimizer steps of a run that the benchmark never reaches."""
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
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


class Made:
    """Micro-batches that were made before: a sample is its index, and collating picks a whole micro-batch."""

    def __init__(self, micro_batches: list[Any], size: int) -> None:
        self.micro_batches, self.size = micro_batches, size

    def __len__(self) -> int:
        return len(self.micro_batches) * self.size

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices

    def collate(self, indices: list[int]) -> Any:
        return self.micro_batches[indices[0] // self.size]


class Work(NamedTuple):
    """The work of each loop."""

    case: Case
    is_made: bool
    """Whether micro-batches were made before, or are joined from samples."""
    precision: str
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    max_grad_norm: float | None
    """Clip each step, and read its loss, as people do; None for neither."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Run the forward pass of a micro-batch, as people write it."""
        if DEVICE.type == "cuda":
            batch = [tensor.pin_memory().to(DEVICE, non_blocking=True) for tensor in batch]
        is_mixed = self.precision == "bf16"
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16) if is_mixed else nullcontext():
            return loss_of(model, batch)

    def model(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = self.case.model().to(DEVICE)
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

    def options(self) -> dict[str, Any]:
        """Return the options of a plan for this work."""
        size = self.case.micro_batch
        counts = {"target_batch": ACCUMULATION * size, "max_micro_batch": size}
        known = {"device": DEVICE.type, "memory_budget": "1GiB", "split_check": "off", "progress": False}
        return known | counts | {"precision": self.precision}

    def segment(self, step: Callable[[], object]) -> Segment:
        """Return what takes so many steps as a segment has."""
        return lambda: [step() for _ in range(self.case.steps)]


def by_hand(work: Work) -> Segment:
    """Take steps as people write them: clip, and read the loss; without clipping, neither."""
    model, optimizer = work.model()
    data, max_norm = work.stream(), work.max_grad_norm

    def step() -> None:
        total = torch.zeros((), device=DEVICE)
        for _ in range(ACCUMULATION):
            loss = work.loss(model, next(data)) / ACCUMULATION
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


class ByFit:
    """`autobatch.fit` as it is, in a thread of its own, which waits after each segment of steps."""

    def __init__(self, work: Work) -> None:
        self._steps, self._count, self._error = work.case.steps, 0, None
        self._may_go, self._is_done = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._train, args=(work,), daemon=True).start()
        self._wait()

    def _train(self, work: Work) -> None:
        try:
            with tempfile.TemporaryDirectory() as out:
                autobatch.fit(
                    work.workload(), **work.options(), trials=0, steps=ENDLESS, out=out,
                    max_grad_norm=work.max_grad_norm, until=self._stepped,
                )  # fmt: skip
        except BaseException as error:
            self._error = error
        finally:
            self._is_done.release()

    def _stepped(self, record: autobatch.StepRecord) -> None:
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


def by_batches(work: Work) -> Segment:
    """Run a loop of one's own with `autobatch.batches`."""
    model, optimizer = work.model()
    workload = work.workload()
    plan = autobatch.plan(workload, **work.options())
    batches = iter(autobatch.batches(workload, plan, optimizer=optimizer, steps=ENDLESS))

    def step() -> None:
        batch = next(batches)
        for micro in batch:
            batch.backward(work.loss(model, micro.data))
        batch.step(max_grad_norm=work.max_grad_norm)

    return work.segment(step)


LOOPS: dict[str, Callable[[Work], Segment]] = {"fit": ByFit, "batches": by_batches}
WORKS: dict[str, tuple[Any, float | None, dict[str, Any]]] = {
    "adam, clipped": (torch.optim.Adam, 1.0, {"hand": by_hand, **LOOPS}),
    "sgd": (lambda weights: torch.optim.SGD(weights, lr=1e-3), None, {"bare": by_hand, **LOOPS}),
}
"""Optimizer, norm and loops of each work; the first loop is the reference."""
HEAD = ("case", "micro-batches", "precision", "work", "loop", "µs a micro-batch", "CPU ratio", "wall ratio")


def in_turn(segments: Mapping[str, Segment], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Time a segment of each loop in every round, in an order that rotates; return seconds by loop."""
    names = list(segments)
    seconds: dict[str, dict[str, list[float]]] = {name: {clock: [] for clock in CLOCKS} for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            start = {clock: read() for clock, read in CLOCKS.items()}
            segments[name]()
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            for clock, read in CLOCKS.items():
                seconds[name][clock].append(read() - start[clock])
    return seconds


def compare(case: str, source: str, precision: str, work: str, rounds: int) -> Iterator[list[str]]:
    """Yield the row of each loop: its time per micro-batch, and its ratio to the reference."""
    optimizer, max_norm, loops = WORKS[work]
    segments: dict[str, Segment] = {}
    for name, make in loops.items():
        torch.manual_seed(0)
        segments[name] = make(Work(CASES[case], source == "made", precision, optimizer, max_norm))
    in_turn(segments, 1)  # warms up
    seconds = in_turn(segments, max(2, rounds // (20 // CASES[case].steps)))
    reference = seconds[next(iter(segments))]
    micro_batches = ACCUMULATION * CASES[case].steps
    for name, own in seconds.items():
        ratios = {
            clock: [a / b for a, b in zip(own[clock], reference[clock], strict=True)] for clock in CLOCKS
        }
        low, middle, high = statistics.quantiles(ratios["cpu"], n=4)
        micros = statistics.median(own["cpu"]) / micro_batches * 1e6
        wall = statistics.median(ratios["wall"])
        figures = (f"{micros:.0f}", f"{middle:.3f} [{low:.2f}, {high:.2f}]", f"{wall:.3f}")
        yield [case, source, precision, work, name, *figures]


def main() -> None:
    """Measure every combination, print and save the table."""
    options = arguments(
        __doc__, rounds=400, cases=[*CASES], precisions=["fp32", "bf16"], sources=["made", "joined"],
        works=[*WORKS], no_save=False,
    )  # fmt: skip
    torch.set_num_threads(1)
    rows: list[list[str]] = []
    asked = (options.cases, options.sources, options.precisions, options.works)
    with tempfile.TemporaryDirectory() as os.environ["AUTOBATCH_HOME"]:
        for about in itertools.product(*asked):
            own = [*compare(*about, options.rounds)]
            print(markdown(HEAD, own), flush=True)
            rows += own
            if not options.no_save:
                # After each combination, because all of them take a quarter of an hour.
                save("loop", markdown(HEAD, rows), rounds=options.rounds)


if __name__ == "__main__":
    main()
