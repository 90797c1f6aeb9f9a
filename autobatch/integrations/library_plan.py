"""A plan for the training loop of another library, and notes on what is not exact in that loop.

Such a loop runs equal micro-batches. It takes the user's model, data, loss and optimizer as they are. The
probe runs on copies, so that what they keep and log stays as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Unpack

import msgspec
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

import autobatch
from autobatch.core.errors import DoesNotFitError, InputError
from autobatch.core.options import Keywords
from autobatch.distributed.group import join_existing
from autobatch.planning import equal_parts_note, with_equal_parts
from autobatch.report.result import PlanResult
from autobatch.training.split_check import batch_norms, statistics_notes
from autobatch.workload.contract import Workload, is_stream, kind_of


@dataclass(frozen=True, kw_only=True)
class LibraryLoop:
    """The loop of a library, as far as it decides about the gradient."""

    name: str
    world_size: int
    device: torch.device
    divides_by_plan: bool = True
    """True if a last step of fewer micro-batches is divided by the planned number, False by its own."""
    averages_means: bool = True
    """True if the losses of micro-batches are means, and weigh the same."""
    sets_rate: bool = False
    """True if the library takes the planned learning rate, False if the user's optimizer keeps its own."""
    remarks: Sequence[str] = ()
    """Lines on what was set in the library besides the plan."""


def plan_for(
    workload: Workload, loop: LibraryLoop, target_batch: int, **options: Unpack[Keywords]
) -> PlanResult:
    """Probe and plan in equal micro-batches, and note what the library's loop makes of them.

    Args:
        workload: what the library trains.
        loop: how it trains.
        target_batch: samples per optimizer step, over all ranks.
        options: those of `autobatch.plan`.

    Raises:
        InputError: an option is invalid, or the ranks do not divide the target batch.
        DoesNotFitError: not even a micro-batch of 1 fits.
    """
    if loop.device.type not in ("cpu", "cuda"):
        raise InputError(f"autobatch probes on cpu and cuda, and the library trains on {loop.device.type}")
    # A launcher makes cpu:0.
    options.setdefault("device", "cpu" if loop.device.type == "cpu" else str(loop.device))
    # These loops add the gradient of each micro-batch to ``grad``, which has the type of the weights.
    options.setdefault("gradient_dtype", "weights")
    options["split"] = "count"
    # The check is for autobatch's own sum; the notes below say what the library's sum is.
    options.setdefault("split_check", "off")
    ranks = join_existing(loop.world_size)
    try:
        plan = autobatch.plan(workload, target_batch=target_batch, world_size=loop.world_size, **options)
    except Exception:
        ranks.gather(0)
        raise
    remarks = [*loop.remarks]
    if ranks.world < loop.world_size:
        remarks.append("each process has planned for itself, because they are not connected yet")
    limits = ranks.gather(plan.micro_batch)
    rank = limits.index(min(limits))
    if not limits[rank]:
        raise DoesNotFitError(f"rank {rank} has no plan: its own message says why")
    if limits[rank] < plan.micro_batch:
        remarks.insert(0, f"all ranks run micro-batches of at most {limits[rank]}, as fit on rank {rank}")
        plan = msgspec.structs.replace(plan, micro_batch=limits[rank])
    limit = min(plan.micro_batch, plan.probe.micro_batch)
    plan = with_equal_parts(plan)
    remarks += _remarks(loop, workload, plan, limit)
    return msgspec.structs.replace(plan, notes=[f"{loop.name}: {remark}" for remark in remarks])


def _remarks(loop: LibraryLoop, workload: Workload, plan: PlanResult, limit: int) -> Iterator[str]:
    """Yield what the loop of a library does with a plan, where that is not what the plan says."""
    steps = plan.accumulation_steps
    if not loop.sets_rate and plan.learning_rate != workload.learning_rate:
        yield (
            f"the optimizer keeps its rate of {workload.learning_rate:g}: build it with plan.learning_rate, "
            f"{plan.learning_rate:g}"
        )
    if (note := equal_parts_note(plan, limit)) is not None:
        yield note
    if steps > 1 and loop.averages_means:
        yield (
            "each micro-batch has the same weight, which is exact for a loss that is a mean over samples and "
            "not for one over tokens: autobatch.batches is exact for both"
        )
    model: Any = workload.model
    yield from statistics_notes([layer.momentum for layer in batch_norms(model())], plan.micro_batches)
    data: Any = workload.train_data
    if not is_stream(data) and (rest := len(data) % plan.target_batch):
        divided = (
            f" and is still divided by {steps} micro-batches" if loop.divides_by_plan and steps > 1 else ""
        )
        yield (
            f"the last step of each epoch is smaller, as {rest} of {plan.target_batch} samples are left for "
            f"it, or fewer if the loader drops some{divided}: autobatch.batches carries them into the next"
        )


def precision_of(name: str, known: Mapping[str, Any], library: str) -> Any:
    """Return the precision of a plan for that of a library; raise if there is none."""
    if name not in known:
        raise InputError(
            f"autobatch plans for the precisions {', '.join(known)} of {library}, found {name}: choose one"
        )
    return known[name]


def rebuilt(optimizer: torch.optim.Optimizer, model: nn.Module, copy: nn.Module) -> torch.optim.Optimizer:
    """Build an optimizer like another one, over the parameters of a copy of its model.

    Raises:
        InputError: the optimizer trains something that the model does not have.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
    there = dict(copy.named_parameters(remove_duplicate=False))
    groups = []
    for group in optimizer.param_groups:
        if any(id(parameter) not in names for parameter in group["params"]):
            raise InputError(
                f"{kind_of(optimizer)} trains parameters that are not the model's: build it from "
                "model.parameters()"
            )
        groups.append(group | {"params": [there[names[id(parameter)]] for parameter in group["params"]]})
    # Defaults may hold what a base class is told: AdamW, for example, hands decoupled_weight_decay to Adam.
    known = inspect.signature(type(optimizer)).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in known}
    return type(optimizer)(groups, **defaults)


def float32_outputs(model: nn.Module, accelerator: Any) -> AbstractContextManager[object]:
    """Copy the outputs of a model to float32 within a block, as accelerate does if it computes in 16 bits."""
    if accelerator.mixed_precision == "no":
        return nullcontext()
    convert = import_module("accelerate.utils").convert_to_fp32
    return model.register_forward_hook(lambda _, inputs, outputs: convert(outputs))


@contextmanager
def on_host(model: nn.Module) -> Iterator[None]:
    """Move a model to the host within the block, so that a probe on its device has room for a copy."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    model.to("cpu")
    if device.type == "cuda":
        torch.cuda.empty_cache()
    try:
        yield
    finally:
        model.to(device)


def check_resizable(loader: Any) -> None:
    """Raise if the batch size of a loader cannot be changed."""
    sampler = getattr(loader, "batch_sampler", None)
    # That of torchdata's stateful loader has the same fields.
    is_own = type(sampler) is not BatchSampler and not type(sampler).__module__.startswith("torchdata.")
    if not isinstance(loader, DataLoader) or is_own:
        raise InputError(
            f"the batch size of {kind_of(loader)} cannot be changed: give a torch DataLoader of single "
            "samples, with a batch_size and no batch_sampler, and plan before the library prepares it"
        )


def resize(loader: DataLoader[Any], size: int) -> None:
    """Change the batch size of a loader, in samples."""
    loader.batch_sampler.batch_size = size  # type: ignore[union-attr]
    # A loader refuses another value, because only its sampler reads it.
    object.__setattr__(loader, "batch_size", size)
