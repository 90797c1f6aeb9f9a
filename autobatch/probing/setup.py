"""Opening what a probe runs on: device, model, worst_case samples; and what the answer depends on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from autobatch.core.errors import InputError
from autobatch.core.knobs import EXPANDABLE, PRECISION, Value
from autobatch.core.options import Options
from autobatch.core.records import DeviceRecord, Precision, Record
from autobatch.device.allocator.caching import AllocatorConfig, CachingAllocator
from autobatch.device.allocator.ledger import Allocator, CountingAllocator
from autobatch.device.base import Device
from autobatch.device.select import device_kind, open_device
from autobatch.planning import rank_share
from autobatch.probing.attempt import TrainSetup
from autobatch.probing.cache import KeyValue
from autobatch.workload.contract import WholeBatchLoss, Workload, kind_of
from autobatch.workload.data import WorstCaseSampler
from autobatch.workload.demo import MEMORY_BUDGET
from autobatch.workload.nested import tensors_of
from autobatch.workload.reference import DEMO, load_workload
from autobatch.workload.rng import preserved_random_state, seed_everything
from autobatch.workload.user_code import user_code


class SetupInfo(Record, frozen=True, kw_only=True):
    """What a plan needs to know of a bench, without the bench."""

    device: DeviceRecord
    key: dict[str, KeyValue]
    """Everything that changes what fits."""
    samples: int
    """Samples of the training data."""
    learning_rate: float
    base_batch: int | None
    precision: Precision
    name: str
    allocator: AllocatorConfig | None = None
    """Settings of the device's caching allocator; None if it caches nothing."""
    compute_capability: tuple[int, int] | None = None
    """Of the GPU that runs the operators; None if the CPU runs them."""
    may_spill: bool = False
    """True if the driver may move memory to the host where an allocation should fail."""
    size_quartiles: list[float] = []
    """Quartiles of the samples' costs; empty where all cost alike."""
    notes: list[str] = []


def with_knobs(setup: TrainSetup, knobs: Mapping[str, Value]) -> TrainSetup:
    """The bench of a configuration: its precision, what it changes in a step, and how memory is allocated."""
    precision: Precision = knobs.get(PRECISION) or setup.precision  # type: ignore[assignment]
    device = setup.device
    if knobs.get(EXPANDABLE) and device.why_not_expandable() is None:
        device = device.expandable()
    return replace(setup, precision=precision, device=device, knobs=knobs)


def find_workload(workload: object) -> Workload:
    """The workload itself, or the one that a reference names; the demo where there is none.

    Raises:
        InputError: the reference leads nowhere, or something else was given.
    """
    if isinstance(workload, Workload):
        return workload
    if not (workload is None or isinstance(workload, str)):
        hint = ": call it" if callable(workload) else ""
        raise InputError(f"the workload must be an autobatch.Workload, found {kind_of(workload)}{hint}")
    return load_workload(workload or DEMO)


def open_setup(
    workload: Workload, options: Options, *, environ: Mapping[str, str] = os.environ, demo: bool = False
) -> TrainSetup:
    """Build what attempts run on; the caller's random states are left alone.

    Args:
        workload: what the user handed over.
        options: device, budget, precision, seed.
        environ: where AUTOBATCH_HOME may stand.
        demo: the embedded demo runs, which brings a budget of its own.

    Raises:
        InputError: the device, the budget or the model cannot be.
    """
    device = open_device(options.device, memory_budget=budget_of(options, demo=demo), environ=environ)
    with preserved_random_state():
        seed_everything(options.seed)
        model = build_model(workload)
        worst_case = WorstCaseSampler(workload)
        worst_case.check_collate()
    return TrainSetup(
        workload=workload,
        model=model,
        device=device,
        worst_case=worst_case,
        precision=precision_of(options, device),
        max_grad_norm=getattr(options, "max_grad_norm", None),
        ema=getattr(options, "ema", None),
        window=whole_batch_of(workload, options),
    )


def whole_batch_of(workload: Workload, options: Options) -> int | None:
    """Samples of an optimizer step, where the loss sees all of them and they are known."""
    if not isinstance(workload.loss, WholeBatchLoss):
        return None
    target: int | None = getattr(options, "target_batch", None)
    return None if target is None else rank_share(target, 1, 0)


def budget_of(options: Options, *, demo: bool) -> str | int | None:
    """The budget that was asked for; the demo's own where none was."""
    if options.memory_budget is not None or not demo:
        return options.memory_budget
    return MEMORY_BUDGET.get(device_kind(options.device))


def build_model(workload: Workload) -> nn.Module:
    """Call the workload's ``model``.

    Raises:
        InputError: it returns no module.
    """
    with user_code("model"):
        model = workload.model()
    if not isinstance(model, nn.Module):
        raise InputError(f"Workload(model=…) returned a {type(model).__name__}, not a torch.nn.Module")
    return model


def precision_of(options: Options, device: Device) -> Precision:
    """Return the precision that was asked for; ``auto`` leaves it to the device."""
    return device.default_precision() if options.precision == "auto" else options.precision


def describe_setup(setup: TrainSetup) -> SetupInfo:
    """Describe a bench."""
    workload = setup.workload
    device = setup.device.describe()
    with preserved_random_state():
        key = _key(setup, device)
    return SetupInfo(
        device=device,
        key=key,
        samples=len(workload.train_data),  # type: ignore[arg-type]
        learning_rate=workload.learning_rate,
        base_batch=workload.base_batch,
        precision=setup.precision,
        name=workload.name,
        allocator=setup.device.allocator_config,
        compute_capability=setup.device.compute_capability,
        may_spill=setup.device.may_spill,
        size_quartiles=setup.worst_case.size_quartiles(),
        notes=[*device.notes, *setup.worst_case.notes, *whole_batch_notes(workload, setup.window)],
    )


def whole_batch_notes(workload: Workload, window: int | None) -> list[str]:
    """What a person should know of an answer for a loss over a whole window of an unknown size."""
    if window is not None or not isinstance(workload.loss, WholeBatchLoss):
        return []
    return [
        "the loss sees all samples of an optimizer step, and without a target batch two micro-batches were "
        "taken for all of them: more take more memory; plan, tune, fit and estimate --target-batch count them"
    ]


def new_allocator(facts: SetupInfo, *, capped: bool = True, expandable: bool | None = None) -> Allocator:
    """An empty model of the device's allocator, as `Device.new_allocator` makes it.

    Args:
        facts: the device and its budget.
        capped: with the budget as its limit.
        expandable: how an allocator that caches grows; ``None``: as on the device.
    """
    limit = facts.device.budget_bytes if capped else None
    if facts.allocator is None:
        return CountingAllocator(limit)
    asked = facts.allocator.expandable_segments if expandable is None else expandable
    return CachingAllocator(limit, replace(facts.allocator, expandable_segments=asked))


def _key(setup: TrainSetup, device: DeviceRecord) -> dict[str, KeyValue]:
    sample = setup.worst_case.batch(2)
    loss = setup.workload.loss
    functions = [loss.represent, loss.loss] if isinstance(loss, WholeBatchLoss) else [loss]
    return {
        "workload": setup.workload.name,
        "model": _digest(
            *(
                f"{name}:{tuple(p.shape)}:{p.dtype}:{p.requires_grad}"
                for name, p in setup.model.named_parameters()
            ),
            *(f"{name}:{type(module).__qualname__}" for name, module in setup.model.named_modules()),
        ),
        "samples": _digest(*(f"{tuple(t.shape)}:{t.dtype}" for t in tensors_of(sample))),
        "loss": "+".join(map(_name_of, functions)),
        "window": setup.window,
        "optimizer": _digest(_optimizer_line(setup.workload)),
        "precision": setup.precision,
        "max_grad_norm": None if setup.max_grad_norm is None else str(setup.max_grad_norm),
        # What it weighs does not depend on the decay.
        "ema": None if setup.ema is None else "on",
        "device": device.name,
        "device_kind": device.kind,
        "total_bytes": device.total_bytes,
        "budget_bytes": device.budget_bytes,
        "torch": str(torch.__version__),
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF")),
        "world_size": 1,
    }


def _name_of(function: object) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def _optimizer_line(workload: Workload) -> str:
    """Class and settings of the optimizer."""
    made = stand_in_optimizers(workload)
    if not made:
        return str(getattr(workload.optimizer, "__qualname__", type(workload.optimizer).__qualname__))
    return ";".join(
        f"{type(one).__qualname__}:{sorted((key, str(value)) for key, value in one.defaults.items())}"
        for one in made
    )


def stand_in_optimizers(workload: Workload) -> list[torch.optim.Optimizer]:
    """The optimizer made for a stand-in parameter; none where it wants the model's own."""
    try:
        made = workload.optimizer([nn.Parameter(torch.zeros(1))], workload.learning_rate)
    except Exception:
        return []
    several = made if isinstance(made, list | tuple) else [made]
    return [one for one in several if isinstance(one, torch.optim.Optimizer)]


def _digest(*lines: str) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
