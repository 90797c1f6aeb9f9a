"""The same work by accelerate, Fabric and Lightning's Trainer, as their documentation shows it.

With a norm, they clip and read the loss of each step.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from torch import Tensor

from benchmarks.loop.work import ACCUMULATION, Paced, Segment, Work, loss_of


def by_accelerate(work: Work) -> Segment:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    # accelerate keeps its precision for the whole process.
    AcceleratorState._reset_state(reset_partial_state=True)
    mixed = "bf16" if work.precision == "bf16" else "no"
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION, mixed_precision=mixed)
    model, optimizer = accelerator.prepare(*work.model())
    data, max_norm = work.stream(), work.max_grad_norm

    def step() -> None:
        total = torch.zeros(())
        for _ in range(ACCUMULATION):
            with accelerator.accumulate(model):
                loss = loss_of(model, next(data))
                accelerator.backward(loss)
                total += loss.detach() / ACCUMULATION
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                optimizer.zero_grad()
        total.item()

    return work.segment(step)


def by_fabric(work: Work) -> Segment:
    from lightning.fabric import Fabric

    precision: Any = "bf16-mixed" if work.precision == "bf16" else "32-true"
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    model, optimizer = fabric.setup(*work.model())
    data, max_norm = work.stream(), work.max_grad_norm

    def step() -> None:
        total = torch.zeros(())
        for number in range(ACCUMULATION):
            with fabric.no_backward_sync(model, enabled=number < ACCUMULATION - 1):
                loss = loss_of(model, next(data)) / ACCUMULATION
                fabric.backward(loss)
            total += loss.detach()
        fabric.clip_gradients(model, optimizer, max_norm=max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total.item()

    return work.segment(step)


class Stream:
    """Micro-batches without end, with a length, so that Lightning does not look for the end."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def __len__(self) -> int:
        return 10**9

    def __iter__(self) -> Any:
        return self.work.stream()


def by_lightning(work: Work) -> Segment:
    from lightning.pytorch import LightningModule, Trainer

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    quiet = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger")

    def train(stepped: Any) -> None:
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
                stepped()

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return work.optimizer(self.parameters())

        Trainer(
            accelerator="cpu",
            devices=1,
            precision="bf16-mixed" if work.precision == "bf16" else "32-true",
            accumulate_grad_batches=ACCUMULATION,
            gradient_clip_val=work.max_grad_norm,
            max_epochs=1,
            **dict.fromkeys(quiet, False),
        ).fit(Module(), Stream(work))

    return Paced(work.case.steps, train)
