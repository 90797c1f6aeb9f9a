"""The same work by accelerate, Fabric and Lightning's Trainer.

`accelerated` and `fabricated` take steps of any model, also on several ranks.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.loop.loops import ACCUMULATION, Step, Work, loss_of


def by_accelerate(work: Work) -> Step:
    return accelerated(*work.model(), work.stream(), work.precision, work.max_grad_norm)


def by_fabric(work: Work) -> Step:
    from lightning.fabric import Fabric

    precision: Any = "bf16-mixed" if work.precision == "bf16" else "32-true"
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    return fabricated(fabric, *work.model(), work.stream(), work.max_grad_norm)


def accelerated(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Iterator[Any],
    precision: str = "fp32",
    max_grad_norm: float | None = None,
) -> Step:
    """Train as the documentation of accelerate shows it; with a norm, clip and read the loss of each step."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    # accelerate keeps its precision for the whole process.
    AcceleratorState._reset_state(reset_partial_state=True)
    mixed = "bf16" if precision == "bf16" else "no"
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION, mixed_precision=mixed)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step() -> None:
        total = torch.zeros(())
        for _ in range(ACCUMULATION):
            with accelerator.accumulate(model):
                loss = loss_of(model, next(data))
                accelerator.backward(loss)
                if max_grad_norm is not None:
                    total += loss.detach() / ACCUMULATION
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
        if max_grad_norm is not None:
            total.item()

    return step


def fabricated(
    fabric: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Iterator[Any],
    max_grad_norm: float | None = None,
) -> Step:
    """Train as the documentation of Fabric shows it; with a norm, clip and read the loss of each step."""
    model, optimizer = fabric.setup(model, optimizer)

    def step() -> None:
        total = torch.zeros(())
        for number in range(ACCUMULATION):
            with fabric.no_backward_sync(model, enabled=number < ACCUMULATION - 1):
                loss = loss_of(model, next(data)) / ACCUMULATION
                fabric.backward(loss)
            if max_grad_norm is not None:
                total += loss.detach()
        if max_grad_norm is not None:
            fabric.clip_gradients(model, optimizer, max_norm=max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if max_grad_norm is not None:
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


def by_lightning(work: Work) -> Step:
    """Run Lightning's Trainer in a thread, one optimizer step at a time."""
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = work.case.model()
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
    quiet = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger")
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        precision="bf16-mixed" if work.precision == "bf16" else "32-true",
        accumulate_grad_batches=ACCUMULATION,
        gradient_clip_val=work.max_grad_norm,
        max_epochs=1,
        **dict.fromkeys(quiet, False),
    )
    paced = Paced(work.stream())
    threading.Thread(target=trainer.fit, args=(Module(), paced), daemon=True).start()
    paced.is_done.acquire()
    return paced.step
