"""The setup that real steps run on: device, model and data."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from autobatch.core.errors import InputError
from autobatch.core.options import Options
from autobatch.core.records import PRECISION, DeviceRecord, GradientDtype, Precision, Record, Value
from autobatch.device.allocator import NewAllocator
from autobatch.device.base import Device
from autobatch.device.cuda import allocator_options
from autobatch.device.oom import memory_named
from autobatch.device.select import device_kind, open_device
from autobatch.step.gradients import gradient_dtype_of, gradient_sum_notes
from autobatch.step.train_state import StepSettings, stand_in_optimizers
from autobatch.workload import demo
from autobatch.workload.contract import WholeBatchLoss, Workload, is_stream
from autobatch.workload.data import DataDigest, WorstCaseSampler, digest_data
from autobatch.workload.nested import tensors_of
from autobatch.workload.order import sampler_of
from autobatch.workload.rng import preserved_random_state, seeded
from autobatch.workload.streams import ENDLESS, Prefix, scanned, stream_notes
from autobatch.workload.user_code import user_code

if TYPE_CHECKING:
    from autobatch.distributed.shard import Sharding

KeyValue = str | int | None


@dataclass(frozen=True, kw_only=True)
class Setup(StepSettings):
    """Model, data, device and settings of attempts and trials, each of which leaves them unchanged."""

    workload: Workload
    model: nn.Module
    device: Device
    worst_case: WorstCaseSampler
    stream: Any = None
    """The user's stream, of which the workload has the first samples; None for data with an index."""
    whole_batch: int | None = None
    """Samples of an optimizer step if the loss sees all of them (`WholeBatchLoss`); None if it does not, or
    if they are unknown."""
    keeps_batches: bool = False
    """True for a loop of the user's own, which keeps each micro-batch until the next one is there."""
    sharding: Sharding | None = None
    """The parts of a rank without the others; None if each rank has a whole model, or to train."""
    world: int = 1
    """Ranks that train together, each on a device of its own."""
    shards: int | None = None
    """Ranks that share the model; None if each has a whole one."""
    clock: Callable[[], float] = time.perf_counter


class SetupInfo(Record, frozen=True, kw_only=True):
    """Description of a setup for a plan: plain values."""

    device: DeviceRecord
    key: dict[str, KeyValue]
    """Everything that changes what fits."""
    samples: int
    """Samples of the training data."""
    epoch_samples: int | None
    """Samples that one pass over the data takes; None for a stream."""
    workers: int | None = None
    """Loader processes that the workload asks for; None if it does not."""
    learning_rate: float
    base_batch: int | None
    gradient_dtype: GradientDtype = "fp32"
    model_bytes: int = 0
    """Bytes of the parameters that are trained."""
    batch_norms: tuple[float | None, ...] = ()
    """Momentum of each BatchNorm layer."""
    name: str
    new_allocator: NewAllocator
    """Models the device's allocator: `Allocator` itself if it caches nothing."""
    largest_sample: tuple[int, float] | None = None
    """Index and size of the largest sample; None if all sizes are equal."""
    data: DataDigest | None = None
    """What tells the training data from others; None for a stream, and for values that are never the same."""
    notes: list[str] = []


def with_knobs(setup: Setup, knobs: Mapping[str, Value]) -> Setup:
    """Return a setup with the precision and the step of a configuration."""
    precision: Precision = knobs.get(PRECISION) or setup.precision  # type: ignore[assignment]
    return replace(setup, precision=precision, knobs=knobs)


def open_setup(workload: Workload, options: Options, world: int = 1, *, rank: int | None = None) -> Setup:
    """Open the device and build the model. Random states stay, and no sample is read yet.

    Args:
        workload: what to train.
        options: options of the run.
        world: ranks that train together.
        rank: of a process that trains; None for one that runs the steps of a rank without the other ranks.

    Raises:
        InputError: the device, the budget or the model is invalid, or ranks cannot train the loss.
    """
    check_loss_of_ranks(workload, world)
    shards = world if options.parallel == "shard" else None
    budget = options.memory_budget
    if budget is None and workload.model is demo.network:
        budget = demo.MEMORY_BUDGET.get(device_kind(options.device))
    stream = workload.train_data if is_stream(workload.train_data) else None
    workload = scanned(workload)
    device = open_device(options.device, budget)
    with seeded(options.seed), memory_named("the model was built"):
        # Ranks that share a model get its first values from rank 0.
        on_meta = None if shards is None else built_on_meta(workload)
        model = build_model(workload) if on_meta is None or rank == 0 else on_meta
    sharding = None
    if shards is not None and rank is None:
        from autobatch.distributed.shard import sharding_alone

        sharding = sharding_alone(shards, device.torch_device.type)
    return Setup(
        workload=workload,
        stream=stream,
        model=model,
        device=device,
        worst_case=WorstCaseSampler(workload, seed=options.seed),
        precision=options.precision,
        gradient_dtype=gradient_dtype_of(model, options.gradient_dtype),
        max_grad_norm=options.max_grad_norm,
        ema=options.ema,
        whole_batch=options.target_batch if isinstance(workload.loss, WholeBatchLoss) else None,
        keeps_batches=options.command == "plan" and shards is None,
        sharding=sharding,
        world=world,
        shards=shards,
    )


def build_model(workload: Workload) -> nn.Module:
    """Build the workload's model.

    Raises:
        InputError: ``Workload(model=…)`` returns no module, or one whose tensors cannot be replaced.
    """
    with user_code("model", workload.model):
        model = workload.model()
        if not isinstance(model, nn.Module):
            raise InputError(f"Workload(model=…) returned a {type(model).__name__}, not a torch.nn.Module")
    if any(map(is_lazy, [*model.parameters(), *model.buffers()])):
        raise InputError("the model has a lazy module: run it once on a sample in Workload(model=…)")
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise InputError("the model has a module of TorchScript: return it unscripted in Workload(model=…)")
    # Modules that the user has put in eval mode stay so. A whole model in eval mode is as a library loads it.
    if not any(module.training for module in model.modules()):
        model.train()
    return model


def built_on_meta(workload: Workload) -> nn.Module | None:
    """Build the workload's model without memory; None if its constructor or its state needs values."""
    try:
        with preserved_random_state(), torch.device("meta"):
            model = build_model(workload)
    except InputError:
        raise
    except Exception:  # whatever a constructor raises without values, it may run with them
        return None
    known = {id(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    others = (value for module in model.modules() for value in vars(module).values())
    # A tensor that is no buffer gets no value later.
    has_others = any(tensor.is_meta and id(tensor) not in known for tensor in tensors_of(list(others)))
    return None if has_others else model


def check_loss_of_ranks(workload: Workload, world: int) -> None:
    """Check that ranks can train the loss of a workload.

    Raises:
        InputError: it sees the whole batch, of which each of several ranks has a part.
    """
    if world > 1 and isinstance(workload.loss, WholeBatchLoss):
        raise InputError(
            f"a WholeBatchLoss trains in one process, and each of {world} ranks has a part of the batch: use "
            "one rank"
        )


def describe_setup(setup: Setup) -> SetupInfo:
    """Describe a setup. The first call reads the sizes of the samples.

    Raises:
        InputError: the samples cannot be collated.
    """
    workload = setup.workload
    device = setup.device.describe()
    # Before anything else reads a sample, as in every process.
    data = data_of_setup(setup)
    with preserved_random_state():
        setup.worst_case.check_collate()
        key = setup_key(setup, device)
    return SetupInfo(
        device=device,
        key=key,
        samples=ENDLESS if isinstance(workload.train_data, Prefix) else len(workload.train_data),
        epoch_samples=None if setup.stream is not None else sampler_of(workload, 1).samples,
        workers=workload.workers,
        learning_rate=workload.learning_rate,
        base_batch=workload.base_batch,
        gradient_dtype=setup.gradient_dtype,
        model_bytes=sum(p.nbytes for p in setup.model.parameters() if p.requires_grad),
        batch_norms=tuple(layer.momentum for layer in setup.model.modules() if isinstance(layer, _BatchNorm)),
        name=workload.name,
        new_allocator=setup.device.new_allocator,
        largest_sample=setup.worst_case.largest(),
        data=data,
        notes=[
            *device.notes,
            *stream_notes(workload.train_data),
            *setup.worst_case.notes,
            *whole_batch_notes(workload, setup.whole_batch),
            *gradient_sum_notes(setup.model, setup.gradient_dtype),
        ],
    )


def data_of_setup(setup: Setup) -> DataDigest | None:
    """Return what tells the training data of a setup from others; None if nothing does."""
    return None if setup.stream is not None else digest_data(setup.workload.train_data)


def whole_batch_notes(workload: Workload, whole_batch: int | None) -> list[str]:
    """Return a note if the loss sees a whole batch of unknown size, else nothing."""
    if whole_batch is not None or not isinstance(workload.loss, WholeBatchLoss):
        return []
    return [
        "the loss sees all samples of an optimizer step, assumed to be two micro-batches here: a larger "
        "batch takes more memory. Give --target-batch to plan, tune, fit or estimate"
    ]


def setup_key(setup: Setup, device: DeviceRecord) -> dict[str, KeyValue]:
    """Return everything that changes what fits, by name."""
    workload, model, loss = setup.workload, setup.model, setup.workload.loss
    functions = [loss.represent, loss.loss] if isinstance(loss, WholeBatchLoss) else [loss]
    optimizers = [
        f"{_name_of(type(made))}:{sorted((key, str(value)) for key, value in made.defaults.items())}"
        for made in stand_in_optimizers(workload)
    ]
    return {
        "workload": workload.name,
        "model": _digest(
            *(f"{name}:{tuple(p.shape)}:{p.dtype}:{p.requires_grad}" for name, p in model.named_parameters()),
            *(f"{name}:{type(module).__qualname__}" for name, module in model.named_modules()),
        ),
        "samples": _digest(*(f"{tuple(t.shape)}:{t.dtype}" for t in tensors_of(setup.worst_case.batch(2)))),
        "loss": "+".join(map(_name_of, functions)),
        "whole_batch": setup.whole_batch,
        "optimizer": _digest(*(optimizers or [_name_of(workload.optimizer)])),
        "max_grad_norm": None if setup.max_grad_norm is None else str(setup.max_grad_norm),
        # Its memory does not depend on the decay.
        "ema": None if setup.ema is None else "on",
        **device_key(setup),
        "budget_bytes": device.budget_bytes,
        "allocator": allocator_options(os.environ) or None,
        "keeps_batches": 1 if setup.keeps_batches else None,
    }


def device_key(setup: Setup) -> dict[str, KeyValue]:
    """Return the part of the key that a bit-exact resume depends on, by its names in messages."""
    device = setup.device.describe()
    return {
        "--precision": setup.precision,
        "--gradient-dtype": setup.gradient_dtype,
        "device": device.name,
        "kind of device": device.kind,
        "size of its memory": device.total_bytes,
        "torch": str(torch.__version__),
        "number of ranks": setup.world,
        "--parallel": "replicate" if setup.shards is None else "shard",
    }


def _name_of(function: object) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def _digest(*lines: str) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
