"""The allocations of a training step, recorded without running it.

The recorded code is the code that trains (`autobatch.step.train_step.train_step`), on fake tensors that have
shapes and no memory, under CUDA's operator policy. The result is the `Trace` that a meter on a device would
record, with a label for every block: its purpose, and the module that made it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import PackedSequence
from torch.utils.hooks import RemovableHandle

from autobatch.core.records import Precision
from autobatch.footprint.tracing.cuda_policy import cuda_policy, leave_gpus_alone, prefer_foreach
from autobatch.footprint.tracing.known_values import fake_with_values, has_values, own_copy, values_kept
from autobatch.footprint.tracing.recording import Recording
from autobatch.footprint.tracing.trace_mode import Recorder
from autobatch.step.train_state import StepSettings, TrainState, build_train_state
from autobatch.step.train_step import train_step
from autobatch.step.whole_batch import batch_samples
from autobatch.workload.contract import Collated, WholeBatchLoss, Workload
from autobatch.workload.nested import HeldMicroBatches, Twice, tensors_of
from autobatch.workload.rng import preserved_random_state


class Arranged(Protocol):
    """A train state that is arranged over ranks."""

    def attach(self, train_state: TrainState) -> None:
        """Change what runs a micro-batch, after the train state was built."""

    def begin_step(
        self, micro_batches: Iterable[tuple[Collated, int]], count: int
    ) -> Iterable[tuple[Collated, int]]:
        """Return the micro-batches of a step, with what has to happen between them."""


class Arrange(Protocol):
    """The way in which ranks share a model."""

    def __call__(self, model: nn.Module, precision: Precision) -> Arranged:
        """Arrange a model over ranks, in place, before its train state is built."""


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
    """Micro-batches of each step; the default is `autobatch.setup.attempt.ATTEMPT_STEPS`."""
    samples: int | None = None
    """Samples of a batch if the loss sees all of them; None otherwise."""
    has_values: bool = False
    """True to keep the values of whole numbers of a batch, such as lengths; the trace is of it alone."""
    most_operators: int | None = None
    """Operators after which a trace ends; None for no limit."""
    keeps_batches: bool = False
    """True for a loop that keeps each micro-batch until the next one is there."""
    arrange: Arrange | None = None
    """Arranges model and gradients over several ranks; None if each rank has a model of its own."""


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
    recorder = Recorder(
        on_gpu=on_gpu,
        values_in=mode if setting.has_values else None,
        most_operators=setting.most_operators,
    )
    with preserved_random_state(), ExitStack() as stack:
        model = fake_model(setting.model, mode)
        stack.enter_context(mode)
        if setting.capability is not None:
            stack.enter_context(cuda_policy(setting.capability))
        if setting.has_values:
            stack.enter_context(values_kept())
        stack.enter_context(recorder)
        stack.enter_context(recorder.noticing_resizes())
        stack.enter_context(_tracked_modules(model, recorder))
        train_state, arranged = _build(setting, model, recorder)
        _run_steps(setting, train_state, _Feed(setting, batch, micro_batch, mode, recorder, arranged))
        return recorder.recording()


def new_mode() -> FakeTensorMode:
    """Return a mode for fakes. A real tensor in the user's code becomes a fake in its first operator."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_copy(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """Return a fake CPU tensor with the same shape, strides and type; a parameter if it is one."""
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)


def fake_model(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Return a copy of a model with fake tensors, in which tied tensors stay tied.

    Raises:
        Exception: a module of the user's cannot be copied.
    """
    model = getattr(model, "_orig_mod", model)  # the module itself, if the model is compiled
    tensors = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        tensors += [value for value in vars(module).values() if isinstance(value, Tensor)]
        tensors += [p.grad for p in module.parameters(recurse=False) if p.grad is not None]
    # deepcopy takes copies from its memo, so it never reads a tensor.
    memo: dict[int, Any] = {id(tensor): fake_copy(tensor, mode) for tensor in tensors}
    return copy.deepcopy(model, memo)


def fake_batch(batch: Any, mode: FakeTensorMode, *, keeps_values: bool = False) -> Any:
    """Return a batch with fake tensors in its tuples, lists, mappings, and attributes of objects.

    Whole numbers keep their values if ``keeps_values``.
    """
    if isinstance(batch, Tensor):
        return fake_with_values(batch, mode) if keeps_values and has_values(batch) else fake_copy(batch, mode)
    if isinstance(batch, MutableMapping):
        made = copy.copy(batch)
        for key, value in batch.items():
            made[key] = fake_batch(value, mode, keeps_values=keeps_values)
        return made
    if isinstance(batch, Mapping):
        return {key: fake_batch(value, mode, keeps_values=keeps_values) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        fakes = [fake_batch(value, mode, keeps_values=keeps_values) for value in batch]
        if keeps_values and isinstance(batch, PackedSequence):
            fakes[1] = own_copy(batch.batch_sizes)  # read without any operator
        return type(batch)(*fakes) if hasattr(batch, "_fields") else type(batch)(fakes)
    if hasattr(batch, "__dict__") and not isinstance(batch, type | nn.Module):
        made = copy.copy(batch)
        # Past a ``__setattr__`` of its own, which may put attributes elsewhere, as that of a graph does.
        for name, value in list(vars(made).items()):
            if isinstance(value, Tensor | Mapping | list | tuple):
                vars(made)[name] = fake_batch(value, mode, keeps_values=keeps_values)
        return made
    return batch


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


def _build(setting: Setting, model: nn.Module, recorder: Recorder) -> tuple[TrainState, Arranged | None]:
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
    return train_state, arranged


@dataclass(frozen=True)
class _Feed:
    """Fake micro-batches, in the memory that a device's feed takes."""

    setting: Setting
    batch: Collated
    micro_batch: int
    mode: FakeTensorMode
    recorder: Recorder
    arranged: Arranged | None = None

    def micro_batches(self, count: int) -> Iterable[tuple[Collated, int]]:
        """Return the micro-batches of a step, each with its number of samples."""
        if isinstance(self.setting.workload.loss, WholeBatchLoss):
            return Twice([(self.batch, self.micro_batch)] * count, self._place)
        # A generator expression holds nothing that it has yielded.
        placed = ((self._place(self.batch), self.micro_batch) for _ in range(count))
        if self.setting.keeps_batches:
            return HeldMicroBatches(placed)
        return placed if self.arranged is None else self.arranged.begin_step(placed, count)

    def _place(self, batch: Collated) -> Collated:
        fake = self._fake(batch)
        self.recorder.count_as("batch", tensors_of(fake))
        return fake

    def _fake(self, batch: Collated) -> Collated:
        with self.recorder.uncounted():
            return fake_batch(batch, self.mode, keeps_values=self.setting.has_values)


def _run_steps(setting: Setting, train_state: TrainState, feed: _Feed) -> None:
    """Run on fakes the steps that an attempt runs on a device."""
    recorder = feed.recorder

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
        samples = batch_samples(setting.samples, feed.micro_batch, count)
        train_step(train_state, feed.micro_batches(count), samples, mark=mark)
        recorder.label("optimizer state", _state_of(train_state))


def _state_of(train_state: TrainState) -> Iterator[Tensor]:
    for optimizer in train_state.optimizers:
        for values in optimizer.state.values():
            yield from tensors_of(values)
