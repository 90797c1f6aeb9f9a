"""The same work by accelerate, Fabric and Lightning's Trainer; each function is as in `contenders`."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.loop.cases import ACCUMULATION, Case, Precision, Source, loss_of
from benchmarks.loop.contenders import Work


def by_accelerate(case: Case, source: Source, precision: Precision, work: Work) -> Callable[[], None]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    # accelerate keeps its precision for the whole process.
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=ACCUMULATION,
        mixed_precision="bf16" if precision == "bf16" else "no",
    )
    model = case.model()
    optimizer = work.optimizer(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    data = case.stream(source)

    def step() -> None:
        total = torch.zeros(())
        for _ in range(ACCUMULATION):
            with accelerator.accumulate(model):
                loss = loss_of(model, next(data))
                total += loss.detach() / ACCUMULATION
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), work.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
        total.item()

    return step


def by_fabric(case: Case, source: Source, precision: Precision, work: Work) -> Callable[[], None]:
    from lightning.fabric import Fabric

    fabric = Fabric(
        accelerator="cpu", devices=1, precision="bf16-mixed" if precision == "bf16" else "32-true"
    )
    model = case.model()
    model, optimizer = fabric.setup(model, work.optimizer(model.parameters()))
    data = case.stream(source)

    def step() -> None:
        total = torch.zeros(())
        for number in range(ACCUMULATION):
            with fabric.no_backward_sync(model, enabled=number < ACCUMULATION - 1):
                loss = loss_of(model, next(data)) / ACCUMULATION
                fabric.backward(loss)
            total += loss.detach()
        fabric.clip_gradients(model, optimizer, max_norm=work.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total.item()

    return step


class Paced:
    """Batches for a loop that has no step function: it waits before every optimizer step."""

    def __init__(self, data: Iterator[Any]) -> None:
        self.data = data
        self.may_go, self.is_done = threading.Semaphore(0), threading.Semaphore(0)

    def __len__(self) -> int:
        """Return a length, so that Lightning does not fetch a batch of the next step ahead."""
        return 10**9

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.is_done.release()
            self.may_go.acquire()
            for _ in range(ACCUMULATION):
                yield next(self.data)

    def step(self) -> None:
        self.may_go.release()
        self.is_done.acquire()


def by_lightning(case: Case, source: Source, precision: Precision, work: Work) -> Callable[[], None]:
    """Run Lightning's Trainer in a thread, one optimizer step at a time."""
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = case.model()
            self.total = torch.zeros(())

        def training_step(self, batch: Any, number: int) -> Tensor:
            loss = loss_of(self.net, batch)
            self.total += loss.detach() / ACCUMULATION
            return loss

        def on_before_zero_grad(self, _: torch.optim.Optimizer) -> None:
            self.total.item()
            self.total = torch.zeros(())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return work.optimizer(self.parameters())

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        precision="bf16-mixed" if precision == "bf16" else "32-true",
        accumulate_grad_batches=ACCUMULATION,
        gradient_clip_val=work.max_grad_norm,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    paced = Paced(case.stream(source))
    threading.Thread(target=trainer.fit, args=(Module(), paced), daemon=True).start()
    paced.is_done.acquire()
    return paced.step
