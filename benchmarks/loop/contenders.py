"""The loops: written by hand, autobatch in both ways, and forward, backward and step alone.

Each function returns one that takes an optimizer step over `ACCUMULATION` micro-batches.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import autobatch
from autobatch import Workload
from autobatch.device.base import SilentMeter
from autobatch.device.cpu import CpuDevice
from autobatch.planning import make_plan
from autobatch.step.train_state import StepSettings, build_train_state
from autobatch.training.loop import Loop
from autobatch.training.metrics import Metrics, RunTotals
from autobatch.workload.loader import Feed, MicroBatches
from autobatch.workload.order import GlobalBatchSampler
from autobatch.workload.split import Split
from benchmarks.loop.cases import ACCUMULATION, Case, Precision, Source, context, loss_of

ENDLESS = 10**9
"""Optimizer steps of a run that the benchmark never reaches."""


@dataclass(frozen=True)
class Work:
    """The optimizer of a step, and whether its gradient is clipped."""

    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    max_grad_norm: float | None


WORKS = {
    "adam, clipped": Work(lambda parameters: torch.optim.Adam(parameters, lr=1e-3), 1.0),
    "sgd": Work(lambda parameters: torch.optim.SGD(parameters, lr=1e-3), None),
}


def by_hand(case: Case, source: Source, precision: Precision, work: Work) -> Callable[[], None]:
    """Clip, and read the loss of each step, as people write it."""
    model = case.model()
    optimizer = work.optimizer(model.parameters())
    data = case.stream(source)

    def step() -> None:
        total = torch.zeros(())
        for _ in range(ACCUMULATION):
            with context(precision):
                loss = loss_of(model, next(data)) / ACCUMULATION
            loss.backward()
            total += loss.detach()
        if work.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), work.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total.item()

    return step


def bare(case: Case, source: Source, precision: Precision, work: Work) -> Callable[[], None]:
    """Run forward, backward and step, and nothing else: no norm, no check, no loss, no line."""
    model = case.model()
    optimizer = work.optimizer(model.parameters())
    data = case.stream(source)

    def step() -> None:
        for _ in range(ACCUMULATION):
            with context(precision):
                loss = loss_of(model, next(data)) / ACCUMULATION
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def by_fit(case: Case, source: Source, precision: Precision, work: Work) -> Callable[[], None]:
    """Run the loop of `autobatch.fit`, with the line of each step and the totals of the run."""
    made = case.made()
    workload = Workload(
        model=case.model,
        train_data=made if source == "made" else case.data,
        collate=made.collate if source == "made" else None,
        loss=loss_of,
        optimizer=lambda parameters, _: work.optimizer(parameters),
        learning_rate=1e-3,
    )
    train_state = build_train_state(
        workload,
        workload.model(),
        torch.device("cpu"),
        StepSettings(precision=precision, max_grad_norm=work.max_grad_norm),
        learning_rate=1e-3,
    )
    loop = Loop(
        workload=workload,
        train_state=train_state,
        sampler=GlobalBatchSampler(
            samples=len(case.data), target_batch=ACCUMULATION * case.micro_batch, seed=0, steps=ENDLESS
        ),
        device=CpuDevice(memory_budget="1GiB"),
        meter=SilentMeter(),
        micro_batch=case.micro_batch,
        split=Split(),
        feed=Feed(MicroBatches(workload, None), Split()),
    )
    run = loop.run()
    lines = Metrics(Path(tempfile.mkdtemp()) / "metrics.jsonl")
    totals = RunTotals()

    def step() -> None:
        record = next(run)
        lines.step(record)
        totals.add(record)

    return step


def by_batches(case: Case, source: Source, precision: Precision, work: Work) -> Callable[[], None]:
    """Run a loop of one's own with `autobatch.batches` over map-style data."""
    made = case.made()
    data: Any = made if source == "made" else case.data
    return _own_loop(case, precision, work, data, collate=made.collate if source == "made" else None)


def by_loader(case: Case, source: Source, precision: Precision, work: Work) -> Callable[[], None]:
    """Run a loop of one's own with `autobatch.batches` over batches, which it cuts and concatenates."""
    data: Any = DataLoader(case.data, batch_size=case.micro_batch, shuffle=True, drop_last=True)
    return _own_loop(
        case, precision, work, case.made().micro_batches if source == "made" else data, batched=True
    )


def _own_loop(case: Case, precision: Precision, work: Work, data: Any, **options: Any) -> Callable[[], None]:
    model = case.model()
    optimizer = work.optimizer(model.parameters())
    target = ACCUMULATION * case.micro_batch
    plan = make_plan(target_batch=target, micro_batch_limit=case.micro_batch, learning_rate=1e-3)
    batches = iter(autobatch.batches(data, plan, steps=ENDLESS, **options))

    def step() -> None:
        batch = next(batches)
        for micro in batch:
            with context(precision):
                loss = loss_of(model, micro.data)
            batch.backward(loss)
        batch.step(optimizer, max_grad_norm=work.max_grad_norm)

    return step
