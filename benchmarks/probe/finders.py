"""Other finders of the largest micro-batch, each on the same limit, with their runs and errors."""

from __future__ import annotations

import importlib.util
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from autobatch import Loss, Workload
from autobatch.device.allocator.tracker import StorageTracker
from autobatch.device.base import Device, Meter
from autobatch.rehearsal.attempt import ATTEMPT_STEPS
from autobatch.step.train_state import StepSettings, build_train_state
from autobatch.step.train_step import train_step
from autobatch.workload.data import load_micro_batch
from autobatch.workload.nested import tensors_of
from benchmarks.probe.limits import Answer, Limit

START = 4096
"""Samples with which accelerate begins."""


def by_accelerate(limit: Limit) -> Answer:
    """Run accelerate as its documentation shows: the decorated function builds model and optimizer."""
    from accelerate.utils import find_executable_batch_size

    device = limit.setup().device
    counts = [0, 0]
    start = time.perf_counter()

    # A loader over fewer samples than the size would run a smaller batch.
    @find_executable_batch_size(starting_batch_size=min(START, limit.cap))
    def train(batch_size: int) -> int:
        counts[0] += 1
        try:
            with meter_of(device) as meter:
                train_anew(limit.workload, meter, batch_size)
        except torch.OutOfMemoryError:
            counts[1] += 1
            raise
        return batch_size

    try:
        found = train()
    except RuntimeError as error:
        if "reached zero" not in str(error):
            raise
        found = 0
    return Answer(found, *counts, time.perf_counter() - start)


def train_anew(workload: Workload, meter: Meter, size: int) -> None:
    """Run the steps of an attempt on the first samples of a shuffled loader."""
    torch.manual_seed(0)
    cpu, settings = torch.device("cpu"), StepSettings(precision="fp32")
    state = build_train_state(
        workload, workload.model().train(), cpu, settings, learning_rate=workload.learning_rate
    )
    order = torch.randperm(len(workload.train_data)).tolist()  # type: ignore[arg-type]
    for count in ATTEMPT_STEPS:

        def batches(count: int = count):
            for _ in range(count):
                with meter.uncounted():
                    batch = load_micro_batch(workload, [order[i % len(order)] for i in range(size)])
                meter.count(tensors_of(batch))
                order[:] = order[size:] + order[:size]
                yield batch, size

        train_step(state, batches(), count * size)


def by_lightning(limit: Limit, mode: str) -> Answer:
    """Run Lightning with its defaults, and two micro-batches per optimizer step as for every finder."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.tuner import Tuner

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    device = limit.setup().device
    torch.manual_seed(0)
    start = time.perf_counter()
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    with (
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(action="ignore"),
        meter_of(device) as meter,
    ):
        module = module_of(limit.workload, meter)
        meter.count(tensor.data for tensor in [*module.parameters(), *module.buffers()])
        given = {"accumulate_grad_batches": 2, **dict.fromkeys(quiet, False)}
        trainer = Trainer(accelerator="cpu", default_root_dir=folder, **given)
        try:
            found = Tuner(trainer).scale_batch_size(module, mode=mode)
        except (ValueError, RuntimeError):
            # If nothing fits it continues to a batch of 0, which its loader rejects.
            found = 0
    return Answer(int(found or 0), module.runs, len(module.failed), time.perf_counter() - start)


def module_of(workload: Workload, meter: Meter) -> Any:
    """Return a workload as a LightningModule, whose batches are collated without being counted.

    The tuner removes callbacks, so the module counts its trials and their out-of-memory errors.
    """
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = workload.model()
            self.batch_size, self.runs = 2, 0
            self.failed: set[int] = set()

        def train_dataloader(self) -> Any:
            ids = range(len(workload.train_data))  # type: ignore[arg-type]
            options = {"batch_size": self.batch_size, "shuffle": True, "collate_fn": self.fetch}
            return torch.utils.data.DataLoader(ids, **options)  # type: ignore[arg-type]

        def fetch(self, ids: list[int]) -> object:
            with meter.uncounted():
                return load_micro_batch(workload, ids)

        def on_train_start(self) -> None:
            self.runs += 1

        def counted(self, function: Callable[..., Any], *args: Any, **more: Any) -> Any:
            try:
                return function(*args, **more)
            except torch.OutOfMemoryError:
                self.failed.add(self.runs)
                raise

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            self.counted(meter.count, tensors_of(batch))
            loss = self.counted(workload.loss, self.net, batch)
            return loss.total / loss.count if isinstance(loss, Loss) else loss

        def backward(self, *args: Any, **more: Any) -> None:
            self.counted(super().backward, *args, **more)

        def optimizer_step(self, *args: Any, **more: Any) -> None:
            # The last micro-batch of a step runs within this call.
            self.counted(super().optimizer_step, *args, **more)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return workload.optimizer(self.parameters(), workload.learning_rate)

    return Module()


def meter_of(device: Device) -> AbstractContextManager[Meter]:
    """Return the meter of the device; on the CPU with the message of torch's allocator, which others
    expect."""
    if device.kind != "cpu":
        return device.enforced()
    text = "DefaultCPUAllocator: can't allocate memory: you tried to allocate {} bytes."
    allocator = device.new_allocator()  # type: ignore[attr-defined]
    return StorageTracker(allocator, text=lambda error: text.format(error.attempted), record=False)


def finders(*, lightning: bool) -> dict[str, Callable[[Limit], Answer]]:
    """Return every other finder whose library is installed, by name."""
    found: dict[str, Callable[[Limit], Answer]] = {}
    if importlib.util.find_spec("accelerate"):
        found[f"accelerate, start {START}"] = by_accelerate
    if lightning and importlib.util.find_spec("lightning"):
        found |= {f"Lightning {mode}": partial(by_lightning, mode=mode) for mode in ("power", "binsearch")}
    return found
