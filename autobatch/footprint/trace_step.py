"""Records the allocations of a training step without running it.

The step is the very one that trains (`autobatch.step.train_step.train_step`), on fake tensors that have
shapes and no memory, under CUDA's operator policy. What comes out is the `Trace` that a meter on a device
would record, with a label for every block: what it is for, and which module made it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autobatch.core.knobs import Configuration
from autobatch.core.records import Precision
from autobatch.footprint.cuda_policy import cuda_policy, prefer_foreach
from autobatch.footprint.trace_mode import Recorder, Recording
from autobatch.step.train_state import TrainState, build_train_state
from autobatch.step.train_step import train_step
from autobatch.step.whole_batch import batch_samples
from autobatch.workload.contract import Collated, WholeBatchLoss, Workload
from autobatch.workload.nested import Twice, tensors_of
from autobatch.workload.rng import preserved_random_state


def new_mode() -> FakeTensorMode:
    """A mode for fakes; a real tensor in the user's code becomes one when an operator meets it."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_copy(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake CPU tensor of the same shape, strides and type; a parameter's is a parameter."""
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)


def fake_model(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy of a model whose tensors are fakes; tied ones stay tied, whoever else holds on to them.

    Raises:
        Exception: what copying the user's modules raises.
    """
    model = getattr(model, "_orig_mod", model)  # of a compiled one, the module itself
    tensors = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        tensors += [value for value in vars(module).values() if isinstance(value, Tensor)]
        tensors += [p.grad for p in module.parameters(recurse=False) if p.grad is not None]
    # With its answer in the memo, deepcopy never looks inside a tensor.
    memo: dict[int, Any] = {id(tensor): fake_copy(tensor, mode) for tensor in tensors}
    return copy.deepcopy(model, memo)


def fake_batch(batch: Any, mode: FakeTensorMode) -> Any:
    """A batch with fakes in place of its tensors: in tuples, lists, mappings, and attributes of objects."""
    if isinstance(batch, Tensor):
        return fake_copy(batch, mode)
    if isinstance(batch, MutableMapping):
        made = copy.copy(batch)
        for key, value in batch.items():
            made[key] = fake_batch(value, mode)
        return made
    if isinstance(batch, Mapping):
        return {key: fake_batch(value, mode) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        twins = [fake_batch(value, mode) for value in batch]
        return type(batch)(*twins) if hasattr(batch, "_fields") else type(batch)(twins)
    if hasattr(batch, "__dict__") and not isinstance(batch, type | nn.Module):
        made = copy.copy(batch)
        for name, value in vars(batch).items():
            if isinstance(value, Tensor | Mapping | list | tuple):
                setattr(made, name, fake_batch(value, mode))
        return made
    return batch


class named:  # noqa: N801 - a context manager
    """Inside, the recorder knows which module's forward is running."""

    def __init__(self, model: nn.Module, recorder: Recorder) -> None:
        self._model = model
        self._recorder = recorder
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._enter(name)))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, name: str) -> Callable[..., None]:
        return lambda *_: self._recorder.modules.append(name)

    def _leave(self, *_: object) -> None:
        if self._recorder.modules:
            self._recorder.modules.pop()


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a step is traced with."""

    workload: Workload
    model: nn.Module
    batch_of: Callable[[int], Collated]
    """A real batch of that many samples, the worst_case."""
    precision: Precision
    capability: tuple[int, int] | None
    """Compute capability of the card; ``None``: the CPU itself, with its own operators."""
    steps: Sequence[int] = (1, 2, 2)
    """Micro-batches a window: as in an attempt on a device (`autobatch.probing.attempt.ATTEMPT_STEPS`)."""
    samples: int | None = None
    """Of an optimizer step, where the loss sees all of them (`TrainSetup.whole_batch`)."""
    max_grad_norm: float | None = None
    ema: float | None = None
    """Decay of the weights' average; ``None``: none is kept."""
    knobs: Configuration = field(default_factory=dict)
    """What the tuner chose; see `autobatch.core.knobs`."""


def record(setting: Setting, micro_batch: int) -> Recording:
    """Trace the windows of an attempt at a micro-batch.

    Raises:
        Exception: what the user's code or torch raises where a step cannot run without its values.
    """
    mode = new_mode()
    batch = setting.batch_of(micro_batch)
    with preserved_random_state():
        model = fake_model(setting.model, mode)
        recorder = Recorder(on_gpu=setting.capability is not None)
        with mode, _policy(setting.capability), recorder, named(model, recorder):
            _train(setting, model, batch, micro_batch, mode, recorder)
        return recorder.recording()


def _train(  # noqa: PLR0917 - one call, to keep the modes in one place
    setting: Setting,
    model: nn.Module,
    batch: Collated,
    micro_batch: int,
    mode: FakeTensorMode,
    recorder: Recorder,
) -> None:
    """Do on fakes what an attempt does on a device."""
    recorder.mark("setup")
    recorder.adopt_as("parameters", [*model.parameters(), *model.buffers()])
    model.train()
    train_state = build_train_state(
        setting.workload,
        model,
        torch.device("cpu"),
        precision=setting.precision,
        learning_rate=setting.workload.learning_rate,
        max_grad_norm=setting.max_grad_norm,
        ema=setting.ema,
        knobs=setting.knobs,
    )
    if train_state.average is not None:
        recorder.label("averaged weights", train_state.average.tensors())
    if setting.capability is not None:
        for optimizer in train_state.optimizers:
            prefer_foreach(optimizer)

    def place(one: Collated) -> Collated:
        with recorder.uncounted():
            made = fake_batch(one, mode)
        recorder.adopt_as("batch", tensors_of(made))
        return made

    def batches(count: int) -> Iterable[tuple[Collated, int]]:
        if isinstance(setting.workload.loss, WholeBatchLoss):
            return Twice([(batch, micro_batch)] * count, place)
        return once(count)

    def once(count: int) -> Iterator[tuple[Collated, int]]:
        held: Collated = None
        for _ in range(count):
            with recorder.uncounted():
                coming = fake_batch(batch, mode)
            if setting.capability is None:
                # A meter on the CPU counts the next batch when the last one is gone; a card holds both.
                held = None
            recorder.adopt_as("batch", tensors_of(coming))
            held = coming
            del coming
            yield held, micro_batch

    def mark(phase: str) -> None:
        if phase == "optimizer":
            for gradients in train_state.gradients.by_optimizer():
                recorder.label("gradients", gradients)
        recorder.mark(phase)

    before: tuple[int, tuple[int, int]] | None = None
    for number, count in enumerate(setting.steps):
        # The first window is never repeated: the optimizer's state appears in it.
        if number > 1 and before is not None and before[0] == count and number == len(setting.steps) - 1:
            recorder.settle()
            if recorder.repeat(before[1]):
                return
        before = (count, recorder.place())
        samples = batch_samples(setting.samples, micro_batch, count)
        train_step(train_state, batches(count), samples, mark=mark)
        recorder.label("optimizer state", _state_of(train_state))


def _policy(capability: tuple[int, int] | None) -> AbstractContextManager[None]:
    return nullcontext() if capability is None else cuda_policy(capability)


def _state_of(train_state: TrainState) -> Iterator[Tensor]:
    for optimizer in train_state.optimizers:
        for values in optimizer.state.values():
            yield from tensors_of(values)
