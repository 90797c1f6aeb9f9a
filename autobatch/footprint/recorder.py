"""Records the allocations of a training step without running it.

The step is the very one that trains (`autobatch.step.run_window`), on fake tensors that have shapes and no
memory, under CUDA's operator policy. What comes out is the `Trace` that a meter on a device would record,
with a label for every block: what it is for, and which module made it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autobatch.batches import tensors_of
from autobatch.footprint.attention import backward_scratch_bytes
from autobatch.footprint.budget import Ledger
from autobatch.footprint.fakes import new_mode, twin_batch, twin_model
from autobatch.footprint.personality import cuda_personality, prefer_foreach
from autobatch.footprint.trace import Trace
from autobatch.footprint.watching import StorageMode
from autobatch.records import Precision
from autobatch.state import preserved_random_state
from autobatch.step import run_window
from autobatch.trainee import Trainee, assemble
from autobatch.workload import Batch, Workload

aten = torch.ops.aten

_PRODUCTS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default})
"""Operators that run on cuBLAS, which takes a workspace at its first call in each thread."""
_CHECK = aten._amp_foreach_non_finite_check_and_unscale_.default


class Label(NamedTuple):
    """What a block is for."""

    kind: str
    """``parameters``, ``gradients``, ``optimizer state``, ``batch``, ``activations`` or ``temporaries``."""
    module: str
    """Name of the module whose forward made it; empty outside of any."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """One traced step."""

    trace: Trace
    """Canonical: its blocks are numbered as they were taken."""
    labels: tuple[Label, ...]
    """By block number."""
    first_products: tuple[int, ...]
    """Indices of the events before which the first product ran: in the forward, and in the backward."""
    has_convolutions: bool


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
    max_grad_norm: float | None = None


def record(setting: Setting, micro_batch: int) -> Recording:
    """Trace the windows of an attempt at a micro-batch.

    Raises:
        Exception: what the user's code or torch raises where a step cannot run without its values.
    """
    mode = new_mode()
    batch = setting.batch_of(micro_batch)
    with preserved_random_state():
        model = twin_model(setting.model, mode)
        recorder = _Recorder(on_card=setting.capability is not None)
        with mode, _policy(setting.capability), recorder, _named(model, recorder):
            _train(setting, model, batch, micro_batch, mode, recorder)
        return recorder.recording()


def _train(  # noqa: PLR0917 - one call, to keep the modes in one place
    setting: Setting,
    model: nn.Module,
    batch: Batch,
    micro_batch: int,
    mode: FakeTensorMode,
    recorder: _Recorder,
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
    )
    if setting.capability is not None:
        for optimizer in trainee.optimizers:
            prefer_foreach(optimizer)

    def batches(count: int) -> Iterator[tuple[Batch, int]]:
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

    for count in setting.windows:
        run_window(trainee, batches(count), micro_batch * count, mark=mark)
        recorder.label("optimizer state", _state_of(trainee))


def _policy(capability: tuple[int, int] | None) -> AbstractContextManager[None]:
    return nullcontext() if capability is None else cuda_personality(capability)


def _state_of(trainee: Trainee) -> Iterator[Tensor]:
    for optimizer in trainee.optimizers:
        for values in optimizer.state.values():
            yield from tensors_of(values)


class _Recorder(StorageMode):  # type: ignore[no-untyped-call]
    """A storage mode for fakes that answers what only values could tell."""

    def __init__(self, *, on_card: bool) -> None:
        super().__init__(Ledger(), storage_device="meta", on_new=self._label_new)
        self._on_card = on_card
        self.modules: list[str] = []
        self._labels: list[Label] = []
        self._phase = "setup"
        self._first: dict[bool, int] = {}
        self._has_convolutions = False
        self._found_inf: set[int] = set()

    def recording(self) -> Recording:
        """What was recorded; call it outside of the mode."""
        trace = self.trace()
        assert trace is not None
        return Recording(
            trace=trace.canonical(),
            labels=tuple(self._labels),
            first_products=tuple(sorted(self._first.values())),
            has_convolutions=self._has_convolutions,
        )

    def mark(self, phase: str) -> None:
        """Say what comes next."""
        super().mark(phase)
        self._phase = phase

    def adopt_as(self, kind: str, tensors: Iterator[Tensor] | Sequence[Tensor]) -> None:
        """Count tensors that were made elsewhere, and say what they are for."""
        adopted = list(tensors)
        self.adopt(adopted)
        self.label(kind, adopted)

    def label(self, kind: str, tensors: Iterator[Tensor] | Sequence[Tensor]) -> None:
        """Say what the blocks of tensors are for."""
        for tensor in tensors:
            block = self.block_of(tensor)
            if block is not None:
                self._labels[block] = self._labels[block]._replace(kind=kind)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator on fakes; see the class."""
        if func is aten._local_scalar_dense.default:
            return self._answer(args[0])
        if self._on_card and func is aten.lift_fresh.default:
            # ``torch.tensor(1.0)``: where no device is named, it stands on the host, also with a card.
            return func(*args, **(kwargs or {}))
        if func in _PRODUCTS:
            self._first.setdefault(torch._C._current_graph_task_id() >= 0, self.position)
        elif func is aten.convolution.default:
            self._has_convolutions = True
        elif func is _CHECK:
            self._found_inf.add(args[1].untyped_storage()._cdata)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        scratch = backward_scratch_bytes(func, args)
        if self._on_card and scratch:
            self.transient(scratch)
        return out

    def _answer(self, tensor: Tensor) -> float | int | bool:
        """A value for ``.item()``: a step that goes well. Nothing overflowed, counts and losses are 1."""
        if tensor.untyped_storage()._cdata in self._found_inf:
            return 0.0
        if tensor.dtype is torch.bool:
            return False
        return 1.0 if tensor.is_floating_point() else 1

    def _label_new(self, block: int) -> None:
        kind = "activations" if self._phase == "forward" else "temporaries"
        assert block == len(self._labels)
        self._labels.append(Label(kind, self.modules[-1] if self.modules else ""))


class _named:  # noqa: N801 - a context manager
    """Inside, the recorder knows which module's forward is running."""

    def __init__(self, model: nn.Module, recorder: _Recorder) -> None:
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
