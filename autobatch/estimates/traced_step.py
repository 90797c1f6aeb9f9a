"""The allocations of a training step, recorded without running it.

The recorded code is the code that trains (`autobatch.step.train_step.train_step`), on fake tensors that have
shapes and no memory, under CUDA's operator policy. The result is the trace that a meter on a device would
record.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from autobatch.device.allocator.trace import Trace
from autobatch.device.base import followed_modules
from autobatch.estimates.attention import Capability
from autobatch.estimates.policy import as_on_cuda, cuda_policy
from autobatch.estimates.recorder import Recorder, fake_batch, fake_model
from autobatch.step.train_state import StepSettings, TrainState, build_train_state
from autobatch.step.train_step import train_step
from autobatch.step.whole_batch import batch_samples
from autobatch.workload.contract import Collated, WholeBatchLoss, Workload
from autobatch.workload.nested import Passes, held, tensors_of
from autobatch.workload.rng import preserved_random_state

if TYPE_CHECKING:  # importing FSDP takes a second
    from autobatch.distributed.shard import Sharding

STEPS = (1, 2)
"""Micro-batches of each step. Adam's state appears in the first step, and ``.grad`` is resident while the
second micro-batch of the other one runs. Every later step does the same as that one."""


@dataclass(frozen=True, kw_only=True)
class TracedStep(StepSettings):
    """Everything that a trace of a step depends on."""

    workload: Workload
    model: nn.Module
    batch_of: Callable[[int], Collated]
    """Returns a real micro-batch of that many samples, the worst case."""
    capability: Capability | None
    """Compute capability of the GPU; None for the CPU with its own operators."""
    multiple: int = 1
    """Number whose multiples the step runs at."""
    steps: Sequence[int] = STEPS
    """Micro-batches of each step."""
    samples: int | None = None
    """Samples of a batch if the loss sees all of them; None otherwise."""
    keeps_batches: bool = False
    """True for a loop that keeps each micro-batch until the next one is there."""
    sharding: Callable[[], AbstractContextManager[Sharding | None]] = nullcontext
    """Acts as a rank within a block, and gives the way in which ranks share a model; None for a whole one."""


class Recording(NamedTuple):
    """The trace of the steps of an attempt."""

    trace: Trace
    """Canonical: blocks are numbered in the order of their allocation."""
    notes: frozenset[str]
    """Remarks on what the trace does not show."""


def record(step: TracedStep, micro_batch: int) -> Recording:
    """Trace the steps of an attempt at a micro-batch.

    Raises:
        Exception: the user's code or torch cannot run the step without the values of its tensors.
    """
    # A real tensor in the user's code becomes a fake in its first operator.
    mode, recorder = FakeTensorMode(allow_non_fake_inputs=True), Recorder(on_gpu=step.capability is not None)
    batch = step.batch_of(micro_batch)
    # What cannot be traced is told in one line.
    logging.getLogger(fake_tensor.__name__).disabled = True

    def place(batch: Collated) -> Collated:
        with recorder.uncounted():
            fake = fake_batch(batch, mode)
        recorder.count(tensors_of(fake))
        return fake

    def micro_batches(count: int) -> Iterable[tuple[Collated, int]]:
        placed = Passes(lambda: ((place(batch), micro_batch) for _ in range(count)))
        if isinstance(step.workload.loss, WholeBatchLoss):
            return placed
        return held(placed) if step.keeps_batches else placed

    with preserved_random_state(), ExitStack() as stack:
        sharding = stack.enter_context(step.sharding())
        model = fake_model(step.model, mode)
        # oneDNN hides the gates of recurrent layers. Single operators show tensors, about as large as what
        # cuDNN keeps.
        stack.enter_context(torch.backends.mkldnn.flags(enabled=False, allow_tf32=None))
        stack.enter_context(mode)
        if step.capability is not None:
            stack.enter_context(cuda_policy(step.capability))
        stack.enter_context(recorder)
        stack.enter_context(followed_modules(model, recorder))
        train_state = _build(step, model, recorder, sharding)
        for count in step.steps:
            samples = batch_samples(step.samples, micro_batch, count)
            train_step(train_state, micro_batches(count), samples, mark=recorder.mark)
    trace = recorder.trace()
    assert trace is not None
    return Recording(trace.canonical(), frozenset(recorder.notes))


def _build(step: TracedStep, model: nn.Module, recorder: Recorder, sharding: Sharding | None) -> TrainState:
    """Build the train state on a fake model."""
    recorder.mark("setup")
    sharded = None
    if sharding is not None:
        # Ranks build their parts only, so the whole model is never on a device.
        with recorder.uncounted():
            sharded = sharding(model, step.precision)
    recorder.count([*model.parameters(), *model.buffers()])
    train_state = build_train_state(step.workload, model, torch.device("cpu"), step)
    if {*map(id, train_state.parameters)}.isdisjoint(map(id, model.parameters())):
        raise RuntimeError("the optimizer is that of another model, which a trace must not train")
    for optimizer in train_state.optimizers:
        # Torch's check for CUDA graphs asks the current GPU (torch/optim/optimizer.py), and so opens a
        # context on one that nobody has chosen.
        setattr(optimizer, "_accelerator_graph_capture_health_check", lambda: None)  # noqa: B010 - a method
        if step.capability is not None:
            as_on_cuda(optimizer)
    if sharded is not None:
        sharded.attach(train_state)
    return train_state
