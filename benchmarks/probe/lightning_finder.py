"""Lightning's ``Tuner.scale_batch_size`` around a workload, inside the meter of a limit."""

from __future__ import annotations

import logging
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from autobatch import Loss, Workload
from autobatch.device.base import Meter
from autobatch.workload.data import load_micro_batch
from autobatch.workload.nested import tensors_of
from benchmarks.probe.finders import Answer, meter_of
from benchmarks.probe.limits import Limit


class Module(LightningModule):
    """A workload as a LightningModule. Its batches are collated without being counted, as for every finder.

    The tuner removes callbacks, so the module counts its trials and their out-of-memory errors.
    """

    def __init__(self, workload: Workload, meter: Meter) -> None:
        super().__init__()
        self.net = workload.model()
        self.workload, self.meter = workload, meter
        self.batch_size = 2
        self.runs = 0
        self.failed: set[int] = set()

    def train_dataloader(self) -> DataLoader:
        count = len(self.workload.train_data)  # type: ignore[arg-type]
        return DataLoader(range(count), batch_size=self.batch_size, shuffle=True, collate_fn=self.fetch)  # type: ignore[arg-type]

    def fetch(self, ids: list[int]) -> object:
        with self.meter.uncounted():
            return load_micro_batch(self.workload, ids)

    def on_train_start(self) -> None:
        self.runs += 1

    def training_step(self, batch: object, _: int) -> torch.Tensor:
        with self.counted():
            self.meter.count(tensors_of(batch))
            loss = self.workload.loss(self.net, batch)
        return loss.total / loss.count if isinstance(loss, Loss) else loss

    def backward(self, *args: object, **more: object) -> None:
        with self.counted():
            super().backward(*args, **more)

    def optimizer_step(self, *args: object, **more: object) -> None:
        # The last micro-batch of a step runs within this call.
        with self.counted():
            super().optimizer_step(*args, **more)

    @contextmanager
    def counted(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            self.failed.add(self.runs)
            raise

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.workload.optimizer(self.parameters(), self.workload.learning_rate)


def by_lightning(limit: Limit, mode: str) -> Answer:
    """Run Lightning with its defaults, and two micro-batches per optimizer step as for every finder."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    device = limit.setup().device
    torch.manual_seed(0)
    start = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(action="ignore"),
        meter_of(device) as meter,
    ):
        module = Module(limit.workload, meter)
        meter.count(tensor.data for tensor in [*module.parameters(), *module.buffers()])
        trainer = Trainer(
            accelerator="cpu",
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accumulate_grad_batches=2,
        )
        try:
            found = Tuner(trainer).scale_batch_size(module, mode=mode)
        except (ValueError, RuntimeError):
            # If nothing fits it continues to a batch of 0, which its loader rejects.
            found = 0
    return Answer(int(found or 0), module.runs, len(module.failed), time.perf_counter() - start)
