"""Records the allocations of a training step without running it.

The step is the very one that trains (`autobatch.step.run_window`), on fake tensors that have shapes and no
memory, under CUDA's operator policy. What comes out is the `Trace` that a meter on a device would record,
with a label for every block: what it is for, and which module made it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autobatch.batches import Twice, tensors_of
from autobatch.caching import window_samples
from autobatch.footprint.fakes import new_mode, twin_batch, twin_model
from autobatch.footprint.naming import named
from autobatch.footprint.personality import cuda_personality, prefer_foreach
from autobatch.footprint.recording import Recorder, Recording
from autobatch.knobs import Configuration
from autobatch.records import Precision
from autobatch.state import preserved_random_state
from autobatch.step import run_window
from autobatch.trainee import Trainee, assemble
from autobatch.workload import Batch, WholeBatchLoss, Workload


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a step is traced with."""

    workload: Workload
    model: nn.Module
    batch_of: Callable[[int], Batch]
    """A real batch of that many samples, the costliest."""
    precision: Precision
    capability: tuple[int, int] | None
    """Compute capability of the card; ``None``: the CPU itself, with its own operators."""
    windows: Sequence[int] = (1, 2, 2)
    """Micro-batches a window: as in an attempt on a device (`autobatch.attempt.WINDOWS`)."""
    samples: int | None = None
    """Of an optimizer step, where the loss sees all of them: those of `autobatch.attempt.Bench.window`."""
    max_grad_norm: float | None = None
    ema: float | None = None
    """Decay of the weights' average; ``None``: none is kept."""
    knobs: Configuration = field(default_factory=dict)
    """What the tuner chose; see `autobatch.knobs`."""


def record(setting: Setting, micro_batch: int) -> Recording:
    """Trace the windows of an attempt at a micro-batch.

    Raises:
        Exception: what the user's code or torch raises where a step cannot run without its values.
    """
    mode = new_mode()
    batch = setting.batch_of(micro_batch)
    with preserved_random_state():
        model = twin_model(setting.model, mode)
        recorder = Recorder(on_card=setting.capability is not None)
        with mode, _policy(setting.capability), recorder, named(model, recorder):
            _train(setting, model, batch, micro_batch, mode, recorder)
        return recorder.recording()


def _train(  # noqa: PLR0917 - one call, to keep the modes in one place
    setting: Setting,
    model: nn.Module,
    batch: Batch,
    micro_batch: int,
    mode: FakeTensorMode,
    recorder: Recorder,
) -> None:
    """Do on fakes what an attempt does on a device."""
    recorder.mark("setup")
    recorder.adopt_as("parameters", [*model.parameters(), *model.buffers()])
    model.train()
    trainee = assemble(
        setting.workload,
        model,
        torch.device("cpu"),
        precision=setting.precision,
        learning_rate=setting.workload.learning_rate,
        max_grad_norm=setting.max_grad_norm,
        ema=setting.ema,
        knobs=setting.knobs,
    )
    if trainee.average is not None:
        recorder.label("averaged weights", trainee.average.tensors())
    if setting.capability is not None:
        for optimizer in trainee.optimizers:
            prefer_foreach(optimizer)

    def place(one: Batch) -> Batch:
        with recorder.aside():
            made = twin_batch(one, mode)
        recorder.adopt_as("batch", tensors_of(made))
        return made

    def batches(count: int) -> Iterable[tuple[Batch, int]]:
        if isinstance(setting.workload.loss, WholeBatchLoss):
            return Twice([(batch, micro_batch)] * count, place)
        return once(count)

    def once(count: int) -> Iterator[tuple[Batch, int]]:
        held: Batch = None
        for _ in range(count):
            with recorder.aside():
                coming = twin_batch(batch, mode)
            if setting.capability is None:
                # A meter on the CPU counts the next batch when the last one is gone; a card holds both.
                held = None
            recorder.adopt_as("batch", tensors_of(coming))
            held = coming
            del coming
            yield held, micro_batch

    def mark(phase: str) -> None:
        if phase == "optimizer":
            for gradients in trainee.gradients.by_optimizer():
                recorder.label("gradients", gradients)
        recorder.mark(phase)

    before: tuple[int, tuple[int, int]] | None = None
    for number, count in enumerate(setting.windows):
        # The first window is never repeated: the optimizer's state appears in it.
        if number > 1 and before is not None and before[0] == count and number == len(setting.windows) - 1:
            recorder.settle()
            if recorder.repeat(before[1]):
                return
        before = (count, recorder.place())
        samples = window_samples(setting.samples, micro_batch, count)
        run_window(trainee, batches(count), samples, mark=mark)
        recorder.label("optimizer state", _state_of(trainee))


def _policy(capability: tuple[int, int] | None) -> AbstractContextManager[None]:
    return nullcontext() if capability is None else cuda_personality(capability)


def _state_of(trainee: Trainee) -> Iterator[Tensor]:
    for optimizer in trainee.optimizers:
        for values in optimizer.state.values():
            yield from tensors_of(values)
