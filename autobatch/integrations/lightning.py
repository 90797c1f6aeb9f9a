"""Lightning: plan for a ``Trainer``, a ``LightningModule`` and a ``LightningDataModule``.

    trainer = Trainer(max_epochs=1)
    plan = autobatch.integrations.lightning.plan(trainer, module, datamodule, target_batch=16)
    trainer.fit(module, datamodule)

``training_step`` is the loss and ``configure_optimizers`` makes the optimizer, so nothing is written twice.
The batch size goes to the attribute ``batch_size`` of the data module (or of the module, or of ``hparams``),
from which ``train_dataloader`` must read it. Give a loader that ``fit`` would get to the plan, which returns
it with the planned batch size:

    plan = autobatch.integrations.lightning.plan(trainer, module, loader, target_batch=16)
    trainer.fit(module, plan.loader)

A callback does the same when ``fit`` begins, in place of
Lightning's ``BatchSizeFinder``:

    trainer = Trainer(
        max_epochs=1, callbacks=[autobatch.integrations.lightning.AutobatchFinder(target_batch=16)]
    )
    trainer.fit(module, datamodule)

Its loop is less exact than autobatch, as the notes of the plan say:

- Each micro-batch has the same weight, whatever it holds: a mean of means.
- Micro-batches are equal (`autobatch.planning.even_split`). The last one of an epoch may be short and has
  the weight of a whole one: give ``drop_last=True`` to the loader.
- The last batch of an epoch may have fewer micro-batches and is still divided by the full number, so its
  gradient is too small. ``plan.last_batch`` is ignored.
- The learning rate belongs to the optimizer: use ``plan.learning_rate`` in ``configure_optimizers``.

`autobatch.batches` has none of these limits.
"""

from __future__ import annotations

import inspect
import os
import warnings
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Unpack

from torch import Tensor
from torch.utils.data import DataLoader

from autobatch.core.errors import InputError
from autobatch.core.keywords import PlanKeywords
from autobatch.core.records.base import Precision
from autobatch.core.records.plan import Plan
from autobatch.integrations.library_plan import LibraryLoop, LibraryPlan, on_host, plan_for, precision_of
from autobatch.integrations.lightning_module import configured, outside_of_fit, transferred
from autobatch.integrations.resized_loader import check_resizable, drops_last, resized
from autobatch.planning import check_world_size, even_split, even_split_note, launched_world_size
from autobatch.workload.contract import Workload, kind_of
from autobatch.workload.loader_parts import parts_of

if TYPE_CHECKING:
    AutobatchFinder: Any

__all__ = ["AutobatchFinder", "arguments", "batch_size", "plan", "workload"]

_PRECISIONS: dict[Precision, str] = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


def arguments(plan: Plan, *, max_grad_norm: float | None = None) -> dict[str, Any]:
    """Return keyword arguments for ``lightning.Trainer``.

    Args:
        plan: of `autobatch.plan`, for the processes that a launcher has started.
        max_grad_norm: the 2-norm to clip the gradient of a batch to; None for no clipping.

    Raises:
        InputError: the plan is for another number of ranks, or they do not divide the target batch.
    """
    check_world_size(plan, launched_world_size(os.environ), "Lightning")
    if (note := even_split_note(plan)) is not None:
        warnings.warn(note, stacklevel=2)
    return {
        "accumulate_grad_batches": even_split(plan)[1],
        "precision": _PRECISIONS[plan.precision],
        "gradient_clip_val": max_grad_norm,
        "gradient_clip_algorithm": None if max_grad_norm is None else "norm",
    }


def batch_size(plan: Plan) -> int:
    """Return the ``batch_size`` for the ``DataLoader`` of one process, in samples.

    Raises:
        InputError: the target batch does not divide equally among the ranks.
    """
    return even_split(plan)[0]


def plan(trainer: Any, module: Any, datamodule: Any = None, **options: Unpack[PlanKeywords]) -> LibraryPlan:
    """Plan for a Lightning ``Trainer``, and set its accumulation and the batch size.

    Args:
        trainer: before ``fit``.
        module: the ``LightningModule``.
        datamodule: the ``LightningDataModule``, or the ``DataLoader`` that ``fit`` would get: then give
            ``plan.loader`` to ``fit``. None if the module has ``train_dataloader``.
        options: those of `autobatch.plan`, such as ``target_batch`` and ``memory_budget``. Precision,
            clipping and device are the trainer's.

    Raises:
        InputError: an option is invalid, or the module trains in a way that a plan cannot describe.
        DoesNotFitError: not even a micro-batch of 1 fits.
    """
    if not module.automatic_optimization:
        raise InputError(
            f"{kind_of(module)} has automatic_optimization=False, so its training_step calls backward "
            "itself: use autobatch.batches in a loop of your own"
        )
    given = None if datamodule is None or hasattr(datamodule, "train_dataloader") else datamodule
    if given is not None:
        check_resizable(given, before="trainer.fit")
        datamodule = None
    known = {value: key for key, value in _PRECISIONS.items()}
    options.setdefault("precision", precision_of(str(trainer.precision), known, "Lightning"))
    if trainer.gradient_clip_val and str(trainer.gradient_clip_algorithm or "norm") == "norm":
        options.setdefault("max_grad_norm", float(trainer.gradient_clip_val))
    with on_host(module), outside_of_fit(module, trainer, datamodule):
        _check_one_optimizer(module)
        holder = _holder(module, datamodule) if given is None else None
        loader = _loader(module, datamodule) if given is None else given
        loop = LibraryLoop(
            name="Lightning",
            world_size=trainer.world_size,
            device=trainer.strategy.root_device,
            divides_by_plan=True,
            drop_last=drops_last(loader),
        )
        resize = None if given is None else partial(resized, given)
        found = plan_for(workload(module, loader), loop, loader=resize, **options)
        if holder is not None:
            setattr(*holder, found.micro_batch)
            _check_size(_loader(module, datamodule), found.micro_batch)
    if holder is not None:  # outside, because attributes of the module are restored
        setattr(*holder, found.micro_batch)
    trainer.accumulate_grad_batches = found.accumulation_steps
    return found


def workload(module: Any, loader: DataLoader[Any]) -> Workload:
    """Build the workload that a ``LightningModule`` trains on the data of a loader.

    Raises:
        InputError: ``configure_optimizers`` returns no optimizer.
    """
    (first, *_), _ = configured(module)
    parts = parts_of(loader)
    return Workload(
        model=lambda: module,
        train_data=parts.train_data,
        collate=parts.collate,
        loss=_loss,
        optimizer=lambda model, _: configured(model)[0],
        learning_rate=float(first.param_groups[0]["lr"]),
        name=type(module).__name__,
    )


def _loss(module: Any, batch: Any) -> Tensor:
    """Return the loss of a micro-batch."""
    takes = [transferred(module, batch), 0][: len(inspect.signature(module.training_step).parameters)]
    found = module.training_step(*takes)
    if isinstance(found, dict):
        found = found.get("loss")
    if not isinstance(found, Tensor):
        raise InputError(f"training_step must return a loss, or a dict with one, found {kind_of(found)}")
    return found


def _check_one_optimizer(module: Any) -> None:
    found = configured(module)[0]
    if len(found) > 1:
        raise InputError(
            f"configure_optimizers returned {len(found)} optimizers, and Lightning steps several only with "
            "automatic_optimization=False: use autobatch.batches in a loop of your own, which steps several"
        )


def _check_size(loader: DataLoader[Any], size: int) -> None:
    if loader.batch_size != size:
        raise InputError(
            f"train_dataloader made a loader of {loader.batch_size} samples, after batch_size was set to "
            f"{size}: let it read self.batch_size"
        )


def _loader(module: Any, datamodule: Any) -> DataLoader[Any]:
    loader = (module if datamodule is None else datamodule).train_dataloader()
    if not isinstance(loader, DataLoader):
        raise InputError(f"train_dataloader must return one DataLoader, found {kind_of(loader)}")
    return loader


def _holder(module: Any, datamodule: Any) -> tuple[Any, str]:
    """Return the object whose attribute ``batch_size`` the loader is made with.

    Raises:
        InputError: nothing has one.
    """
    owners = [one for one in (datamodule, module) if one is not None]
    for owner in owners:
        for holder in (owner, getattr(owner, "hparams", None)):
            if holder is not None and hasattr(holder, "batch_size"):
                return holder, "batch_size"
    names = " nor ".join(type(one).__name__ for one in owners)
    raise InputError(
        f"{'neither ' if len(owners) > 1 else ''}{names} has {'an' if len(owners) > 1 else 'no'} attribute "
        "batch_size, which the plan sets: set self.batch_size and let train_dataloader read it, or give the "
        "loader to the plan and plan.loader to fit"
    )


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import the callback, and with it the library, at first use (PEP 562)."""
        if name == "AutobatchFinder":
            return import_module("autobatch.integrations.lightning_callback").AutobatchFinder
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
