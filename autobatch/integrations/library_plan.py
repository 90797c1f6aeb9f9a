"""A plan for the training loop of another library, and notes on what is not exact in that loop.

Such a loop runs equal micro-batches. It takes the user's model, data, loss and optimizer as they are.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Unpack

import msgspec
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from autobatch.api import library
from autobatch.core.errors import DoesNotFitError, InputError
from autobatch.core.keywords import Keywords
from autobatch.distributed.group import join_existing
from autobatch.planning import even_split, even_split_note
from autobatch.report.result import PlanResult
from autobatch.training.batchnorm import batch_norms, statistics_notes
from autobatch.workload.contract import Workload, is_stream, kind_of

_LOADER_FIELDS = (
    *("dataset", "collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "generator", "prefetch_factor", "persistent_workers"),
)
"""Arguments of a loader that it keeps as attributes, besides those that make its batches."""


@dataclass(frozen=True, kw_only=True)
class LibraryLoop:
    """The loop of a library, as far as it decides about the gradient."""

    name: str
    world_size: int
    device: torch.device
    divides_by_plan: bool
    """True if a last step of fewer micro-batches is divided by the planned number, False by its own."""
    averages_means: bool = True
    """True if the losses of micro-batches are means, and weigh the same."""
    drop_last: bool = False
    """True if the loader drops a last micro-batch that is short."""
    sets_rate: bool = False
    """True if the library takes the planned learning rate, False if the user's optimizer keeps its own."""
    remarks: Sequence[str] = ()
    """Lines on what was set in the library besides the plan."""


class LibraryPlan(PlanResult, frozen=True, kw_only=True):
    """A plan that was set in a library: equal micro-batches, and what is not exact about them."""

    library: str
    loader: Any = None
    """The user's loader with the new batch size, if the library cannot change it."""

    def _text(self) -> str:
        return f"{self.library}: {super()._text()}"


def plan_for(
    workload: Workload,
    loop: LibraryLoop,
    target_batch: int,
    *,
    loader: Callable[[int], Any] | None = None,
    **options: Unpack[Keywords],
) -> LibraryPlan:
    """Probe and plan in equal micro-batches, and note what the library's loop makes of them.

    Args:
        workload: what the library trains.
        loop: how it trains.
        target_batch: samples per optimizer step, over all ranks.
        loader: builds the user's loader for a batch size; None if the library does.
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
    plan, of_ranks = _least_of_ranks(
        lambda: library.plan(workload, target_batch=target_batch, world_size=loop.world_size, **options),
        loop.world_size,
    )
    size, steps = even_split(plan)
    fields = {name: getattr(plan, name) for name in plan.__struct_fields__}
    fields |= {"micro_batch": size, "accumulation_steps": steps, "micro_batches": [size] * steps}
    remarks = [*of_ranks, *loop.remarks, *_remarks(loop, workload, plan, size, steps)]
    fields["notes"] = [f"{loop.name}: {remark}" for remark in remarks]
    return LibraryPlan(**fields, library=loop.name, loader=None if loader is None else loader(size))


def _least_of_ranks(find: Callable[[], PlanResult], world_size: int) -> tuple[PlanResult, list[str]]:
    """Plan on this rank, and take the smallest limit of all ranks; all of them call it.

    Returns:
        The plan, and a remark if another rank limits this one, or the others could not be asked.

    Raises:
        DoesNotFitError: another rank has no plan; its own message says why.
    """
    if world_size == 1:
        return find(), []
    ranks = join_existing(world_size)
    if ranks is None:
        return find(), [
            "each process has planned for itself, because they are not connected before fit: on GPUs with "
            "unlike free memory, give a memory_budget that all of them have, or plan in the callback"
        ]
    try:
        plan = find()
    except Exception:
        ranks.gather(0)
        raise
    limits = ranks.gather(plan.micro_batch)
    least = min(limits)
    rank = limits.index(least)
    if not least:
        raise DoesNotFitError(f"rank {rank} has no plan: its own message says why")
    if least == plan.micro_batch:
        return plan, []
    remark = f"all ranks run micro-batches of at most {least}, as fit on rank {rank}"
    return msgspec.structs.replace(plan, micro_batch=least), [remark]


def _remarks(loop: LibraryLoop, workload: Workload, plan: PlanResult, size: int, steps: int) -> Iterator[str]:
    """Yield what the loop of a library does with a plan, where that is not what the plan says."""
    if not loop.sets_rate and plan.learning_rate != workload.learning_rate:
        yield (
            f"the optimizer keeps its rate of {workload.learning_rate:g}: build it with plan.learning_rate, "
            f"{plan.learning_rate:g}"
        )
    if (note := even_split_note(plan, min(plan.micro_batch, plan.probe.micro_batch))) is not None:
        yield note
    if steps > 1 and loop.averages_means:
        yield (
            "each micro-batch has the same weight, which is exact for a loss that is a mean over samples and "
            "not for one over tokens: autobatch.batches is exact for both"
        )
    model: Any = workload.model
    yield from statistics_notes([layer.momentum for layer in batch_norms(model())], [size] * steps)
    data: Any = workload.train_data
    rest = 0 if is_stream(data) else len(data) % plan.target_batch
    rest -= rest % size if loop.drop_last else 0
    if not rest:
        return
    text = f"the last step of each epoch has {rest} of {plan.target_batch} samples"
    done = math.ceil(rest / size)
    if loop.divides_by_plan and done < steps:
        text += (
            f" in {done} of {steps} micro-batches and is still divided by {steps}, so its gradient is "
            f"{1 - done / steps:.0%} too small"
        )
    if loop.averages_means and rest % size and done > 1:
        text += f"; the samples of its last micro-batch weigh {size / (rest % size):.2g} times as much"
    yield f"{text}: autobatch.batches carries them into the next epoch"


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


class Float32Outputs:
    """A model as accelerate prepares it for 16 bits: its outputs are copied to float32.

    Args:
        model: whose calls are converted; its attributes are passed on.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, and convert what it returns."""
        return import_module("accelerate.utils").convert_to_fp32(self._model(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@contextmanager
def on_host(model: nn.Module) -> Iterator[None]:
    """Move a model to the host within the block, so that a probe on its device has room for a copy."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type == "cpu":
        yield
        return
    model.to("cpu")
    torch.cuda.empty_cache()
    try:
        yield
    finally:
        model.to(device)


def check_resizable(loader: Any, *, before: str) -> None:
    """Raise if a loader cannot be built again with another batch size.

    Args:
        loader: the user's loader.
        before: the call of the library that replaces loaders by its own.
    """
    kind = type(loader)
    # torchdata's loader takes the same arguments.
    is_stateful = kind.__name__ == "StatefulDataLoader" and kind.__module__.startswith("torchdata.")
    if kind is not DataLoader and not is_stateful:
        raise InputError(
            f"the loader must be a torch DataLoader before {before}, found {kind_of(loader)}: plan first, "
            "then give plan.loader to the library"
        )
    sampler = loader.batch_sampler
    if loader.batch_size is None and type(sampler) is not BatchSampler:
        maker = "data that make" if sampler is None else f"{kind_of(sampler)} that makes"
        raise InputError(
            f"the loader has {maker} its batches, whose size cannot be changed: give it single samples, a "
            "batch_size, and a sampler in place of a batch sampler"
        )


def resized(loader: DataLoader[Any], size: int) -> DataLoader[Any]:
    """Return a loader of the same kind and data with another batch size, in samples."""
    kept = {name: getattr(loader, name) for name in _LOADER_FIELDS}
    if not isinstance(loader.dataset, IterableDataset):  # a stream has an order of its own
        kept["sampler"] = loader.batch_sampler.sampler  # type: ignore[union-attr]
    return type(loader)(batch_size=size, drop_last=drops_last(loader), **kept)


def drops_last(loader: DataLoader[Any]) -> bool:
    """Return whether a loader leaves out a last batch that is short, as its batch sampler knows."""
    return bool(getattr(loader.batch_sampler, "drop_last", False))
