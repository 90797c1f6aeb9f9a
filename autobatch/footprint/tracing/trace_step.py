"""The allocations of a training step, recorded without running it.

The recorded code is the code that trains (`autobatch.step.train_step.train_step`), on fake tensors that have
shapes and no memory, under CUDA's operator policy. The result is the `Trace` that a meter on a device would
record, with a label for every block: its purpose, and the module that made it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.hooks import RemovableHandle

from autobatch.footprint.tracing.cuda_policy import cuda_policy, leave_gpus_alone, prefer_foreach
from autobatch.footprint.tracing.fakes import (
    fake_batch,
    fake_model,
    new_mode,
    readable_as_arrays,
    without_log,
)
from autobatch.footprint.tracing.trace_mode import Recorder, Recording
from autobatch.step.train_state import StepSettings, TrainState, build_train_state
from autobatch.step.train_step import train_step
from autobatch.step.whole_batch import batch_samples
from autobatch.workload.contract import Collated, WholeBatchLoss, Workload
from autobatch.workload.nested import HeldMicroBatches, Twice, tensors_of
from autobatch.workload.rng import preserved_random_state

if TYPE_CHECKING:  # importing FSDP takes a second
    from autobatch.distributed.sharding.model import Sharding


@dataclass(frozen=True, kw_only=True)
class Setting(StepSettings):
    """Everything that a trace of a step depends on."""

    workload: Workload
    model: nn.Module
    batch_of: Callable[[int], Collated]
    """Returns a real micro-batch of that many samples, the worst case."""
    capability: tuple[int, int] | None
    """Compute capability of the GPU; None for the CPU with its own operators."""
    steps: Sequence[int] = (1, 2, 2)
    """Micro-batches of each step; the default is `autobatch.rehearsal.attempt.ATTEMPT_STEPS`."""
    samples: int | None = None
    """Samples of a batch if the loss sees all of them; None otherwise."""
    most_operators: int | None = None
    """Operators after which a trace ends; None for no limit."""
    keeps_batches: bool = False
    """True for a loop that keeps each micro-batch until the next one is there."""
    arrange: Sharding | None = None
    """The way in which ranks share a model; None if each has one of its own."""


def record(setting: Setting, micro_batch: int) -> Recording:
    """Trace the steps of an attempt at a micro-batch.

    Args:
        setting: what to trace.
        micro_batch: samples of each micro-batch.

    Raises:
        TooLong: the step has more operators than the setting allows.
        Exception: the user's code or torch cannot run the step without the values of its tensors.
    """
    mode = new_mode()
    batch = setting.batch_of(micro_batch)
    on_gpu = setting.capability is not None
    recorder = Recorder(on_gpu=on_gpu, most_operators=setting.most_operators)
    with preserved_random_state(), ExitStack() as stack:
        model = fake_model(setting.model, mode)
        stack.enter_context(mode)
        if setting.capability is not None:
            stack.enter_context(cuda_policy(setting.capability))
        stack.enter_context(recorder)
        stack.enter_context(recorder.noticing_resizes())
        stack.enter_context(without_log())
        stack.enter_context(readable_as_arrays(recorder.array_of))
        stack.enter_context(_tracked_modules(model, recorder))
        train_state = _build(setting, model, recorder)
        _run_steps(setting, train_state, batch, micro_batch, mode=mode, recorder=recorder)
        return recorder.recording()


@contextmanager
def _tracked_modules(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Keep the recorder's stack of running modules within the block.

    ``torch.utils.module_tracker.ModuleTracker`` does not serve. It has a set of names in place of a stack. A
    submodule that the loss calls directly is named after its class, so two towers share a name. Its hooks on
    gradients change what a recomputing model frees, and slow down a trace of a transformer by a fifth.
    """

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: recorder.modules.append(name)

    def leave(*_: object) -> None:
        if recorder.modules:
            recorder.modules.pop()

    handles: list[RemovableHandle] = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(name)))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _build(setting: Setting, model: nn.Module, recorder: Recorder) -> TrainState:
    """Build the train state on a fake model, with labels for its tensors."""
    recorder.mark("setup")
    arranged = None
    if setting.arrange is not None:
        # Ranks build their parts only, so the whole model is never on a device.
        with recorder.uncounted():
            arranged = setting.arrange(model, setting.precision)
    recorder.count_as("parameters", [*model.parameters(), *model.buffers()])
    model.train()
    train_state = build_train_state(setting.workload, model, torch.device("cpu"), setting)
    if {*map(id, train_state.parameters)}.isdisjoint(map(id, model.parameters())):
        raise RuntimeError("the optimizer is that of another model, which a trace must not train")
    if train_state.exchange is not None:
        recorder.label("gradients", [train_state.exchange])
    if train_state.average is not None:
        recorder.label("averaged weights", train_state.average.tensors())
    for optimizer in train_state.optimizers:
        leave_gpus_alone(optimizer)
        if setting.capability is not None:
            prefer_foreach(optimizer)
    if arranged is not None:
        arranged.attach(train_state)
    return train_state


def _run_steps(
    setting: Setting,
    train_state: TrainState,
    batch: Collated,
    micro_batch: int,
    *,
    mode: FakeTensorMode,
    recorder: Recorder,
) -> None:
    """Run the steps of an attempt on fakes of a batch, which take the memory of a device's feed."""

    def place(batch: Collated) -> Collated:
        with recorder.uncounted():
            fake = fake_batch(batch, mode)
        recorder.count_as("batch", tensors_of(fake))
        return fake

    def micro_batches(count: int) -> Iterable[tuple[Collated, int]]:
        placed = Twice([(batch, micro_batch)] * count, place)
        if isinstance(setting.workload.loss, WholeBatchLoss):
            return placed
        return HeldMicroBatches(placed) if setting.keeps_batches else train_state.begin_step(placed, count)

    def mark(phase: str) -> None:
        if phase == "optimizer":
            for gradients in train_state.gradients.by_optimizer():
                recorder.label("gradients", gradients)
        recorder.mark(phase)

    start = recorder.bookmark()
    for number, count in enumerate(setting.steps):
        is_last = number == len(setting.steps) - 1
        # The first step is never repeated, because the optimizer state appears in it.
        if is_last and number > 1 and count == setting.steps[number - 1]:
            recorder.settle()
            if recorder.repeat(start):
                return
        start = recorder.bookmark()
        samples = batch_samples(setting.samples, micro_batch, count)
        train_step(train_state, micro_batches(count), samples, mark=mark)
        for optimizer in train_state.optimizers:
            for values in optimizer.state.values():
                recorder.label("optimizer state", tensors_of(values))
