"""Lightning: a callback that plans when ``fit`` begins, in place of Lightning's ``BatchSizeFinder``.

    finder = autobatch.integrations.lightning.AutobatchFinder(target_batch=16)
    trainer = Trainer(max_epochs=1, callbacks=[finder])
    trainer.fit(module, datamodule)

``training_step`` is the loss and ``configure_optimizers`` makes the optimizer, so nothing is written twice.
The batch size goes to the attribute ``batch_size`` of the data module (or of the module, or of ``hparams``),
from which ``train_dataloader`` must read it. A loader that ``fit`` got is made again with the planned size.

Its loop is less exact than autobatch, as the notes of the plan and ``docs/loops.md`` say.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from autobatch.core.errors import InputError
from autobatch.core.keywords import PlanKeywords
from autobatch.core.records import Precision
from autobatch.integrations.kept_state import kept_state
from autobatch.integrations.library_plan import (
    LibraryLoop,
    LibraryPlan,
    check_resizable,
    drops_last,
    on_host,
    plan_for,
    precision_of,
    resized,
)
from autobatch.workload.contract import Collated, Workload, kind_of, parts_of
from autobatch.workload.rng import preserved_random_state

if TYPE_CHECKING:
    AutobatchFinder: Any

__all__ = ["AutobatchFinder", "plan_fit", "workload"]

_PRECISIONS: dict[Precision, str] = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


def plan_fit(
    trainer: Any,
    module: Any,
    datamodule: Any = None,
    *,
    target_batch: int,
    **options: Unpack[PlanKeywords],
) -> LibraryPlan:
    """Plan for a Lightning ``Trainer``, and set its accumulation and the batch size, as the callback does.

    Args:
        trainer: before ``fit``.
        module: the ``LightningModule``.
        datamodule: the ``LightningDataModule``, or the ``DataLoader`` that ``fit`` would get, in whose place
            ``plan.loader`` comes. None if the module has ``train_dataloader``.
        target_batch: samples per optimizer step, over all ranks.
        options: those of `autobatch.plan`, such as ``memory_budget``. Precision,
            clipping and device are the trainer's.

    Raises:
        InputError: an option is invalid, or the module trains in a way that a plan cannot describe.
        DoesNotFitError: not even a micro-batch of 1 fits.
    """
    if not module.automatic_optimization:
        raise InputError(
            f"{kind_of(module)} has automatic_optimization=False, so its training_step calls backward "
            "itself: use autobatch.batches in a loop of your own, with a pass over each batch for each "
            "optimizer (docs/loops.md)"
        )
    given = None if datamodule is None or hasattr(datamodule, "train_dataloader") else datamodule
    if given is not None:
        check_resizable(given, before="trainer.fit")
        datamodule = None
    known = {value: key for key, value in _PRECISIONS.items()}
    options.setdefault("precision", precision_of(str(trainer.precision), known, "Lightning"))
    if trainer.gradient_clip_val and str(trainer.gradient_clip_algorithm or "norm") == "norm":
        options.setdefault("max_grad_norm", float(trainer.gradient_clip_val))
    with on_host(module), _outside_of_fit(module, trainer, datamodule):
        optimizers = _configured(module)[0]
        if len(optimizers) > 1:
            raise InputError(
                f"configure_optimizers returned {len(optimizers)} optimizers, and Lightning steps several "
                "only with automatic_optimization=False: use autobatch.batches in a loop of your own, with a "
                "pass over each batch for each of them (docs/loops.md)"
            )
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
        with kept_state(datamodule):
            found = plan_for(workload(module, loader), loop, target_batch, loader=resize, **options)
        if holder is not None:
            holder.batch_size = found.micro_batch
            made = _loader(module, datamodule).batch_size
            if made != found.micro_batch:
                raise InputError(
                    f"train_dataloader made a loader of {made} samples, after batch_size was set to "
                    f"{found.micro_batch}: let it read self.batch_size"
                )
    if holder is not None:  # outside, because attributes of the module are restored
        holder.batch_size = found.micro_batch
    trainer.accumulate_grad_batches = found.accumulation_steps
    return found


def workload(module: Any, loader: DataLoader[Any]) -> Workload:
    """Build the workload that a ``LightningModule`` trains on the data of a loader.

    Raises:
        InputError: ``configure_optimizers`` returns no optimizer.
    """
    (first, *_), _ = _configured(module)
    parts = parts_of(loader)
    return Workload(
        model=lambda: module,
        train_data=parts["train_data"],
        collate=parts["collate"],
        loss=_loss,
        optimizer=lambda model, _: _configured(model)[0],
        learning_rate=float(first.param_groups[0]["lr"]),
        name=type(module).__name__,
    )


def _loss(module: Any, batch: Any) -> Tensor:
    takes = [_transferred(module, batch), 0][: len(inspect.signature(module.training_step).parameters)]
    found = module.training_step(*takes)
    if isinstance(found, dict):
        found = found.get("loss")
    if not isinstance(found, Tensor):
        raise InputError(f"training_step must return a loss, or a dict with one, found {kind_of(found)}")
    return found


def _loader(module: Any, datamodule: Any) -> DataLoader[Any]:
    loader = (module if datamodule is None else datamodule).train_dataloader()
    if not isinstance(loader, DataLoader):
        raise InputError(f"train_dataloader must return one DataLoader, found {kind_of(loader)}")
    return loader


def _holder(module: Any, datamodule: Any) -> Any:
    """Return the object whose attribute ``batch_size`` the loader is made with."""
    owners = [one for one in (datamodule, module) if one is not None]
    for owner in owners:
        for holder in (owner, getattr(owner, "hparams", None)):
            if holder is not None and hasattr(holder, "batch_size"):
                return holder
    names = " nor ".join(type(one).__name__ for one in owners)
    raise InputError(
        f"{'neither ' if len(owners) > 1 else ''}{names} has {'an' if len(owners) > 1 else 'no'} attribute "
        "batch_size, which the plan sets: set self.batch_size and let train_dataloader read it, or give the "
        "loader to fit"
    )


@contextmanager
def _outside_of_fit(module: Any, trainer: Any, datamodule: Any = None) -> Iterator[None]:
    """Let the hooks of a module run within the block although no ``fit`` does.

    The data are prepared and the layers of ``configure_model`` are built, as ``fit`` does first. The state of
    the module is restored, which ``fit`` sets again. So are the random states.
    """
    outside = _NoFit(trainer, datamodule)
    with kept_state(module):
        module._trainer = outside
        module.log = module.log_dict = module.print = _ignore
        module.optimizers = lambda use_pl_optimizer=True: _one_or_all(outside.optimizers)
        module.lr_schedulers = lambda: _one_or_all(outside.schedules) or None
        with preserved_random_state():
            _set_up(module, trainer, datamodule)
            outside.optimizers, outside.schedules = _configured(module)
        yield


def _configured(module: Any) -> tuple[list[torch.optim.Optimizer], list[Any]]:
    """Return optimizers and schedules among the many forms that ``configure_optimizers`` may return."""
    found = module.configure_optimizers()
    schedules: list[Any] = []
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], list | tuple):
        found, schedules = found[0], list(found[1])
    several = found if isinstance(found, list | tuple) else [found]
    made = [one["optimizer"] if isinstance(one, dict) else one for one in several]
    if not made or not all(isinstance(one, torch.optim.Optimizer) for one in made):
        raise InputError(f"configure_optimizers must return an optimizer, found {kind_of(found)}")
    schedules += [one["lr_scheduler"] for one in several if isinstance(one, dict) and "lr_scheduler" in one]
    return made, [one["scheduler"] if isinstance(one, dict) else one for one in schedules]


def _transferred(module: Any, batch: Collated) -> Collated:
    """Return a batch after the hooks around its transfer to the device, which may augment it."""
    datamodule = getattr(getattr(module, "_trainer", None), "datamodule", None)
    for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
        # The last base class defines it to do nothing.
        has_own = sum(hook in vars(kind) for kind in type(datamodule).__mro__) > 1
        batch = getattr(datamodule if has_own else module, hook)(batch, 0)
    return batch


class _NoFit:
    """A trainer outside of ``fit``, which logs nothing and is not copied with its module.

    Args:
        trainer: whose other attributes are passed on.
        datamodule: the data module of the coming ``fit``.
    """

    estimated_stepping_batches = 1000
    barebones = True

    def __init__(self, trainer: Any, datamodule: Any) -> None:
        self._trainer = trainer
        self.datamodule = datamodule
        self.logger = None if trainer.logger is None else _Silent()
        self.loggers = [_Silent() for _ in trainer.loggers]
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedules: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def __deepcopy__(self, _: Any) -> _NoFit:
        return self


class _Silent:
    """A logger that ignores every call."""

    def __getattr__(self, name: str) -> _Silent:
        if name.startswith("__"):  # such as __deepcopy__, which callers only use if it is there
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> _Silent:
        """Do nothing."""
        return self


def _set_up(module: Any, trainer: Any, datamodule: Any) -> None:
    """Run the hooks that ``fit`` runs before it asks for data; within ``fit``, those that are to come."""
    runs = trainer.state.status == "running"
    if datamodule is not None and not runs:
        datamodule.prepare_data()
        datamodule.setup("fit")
    if not runs:
        module.prepare_data()
    module.setup("fit")
    module.configure_model()


def _one_or_all(several: list[Any]) -> Any:
    return several[0] if len(several) == 1 else several


def _ignore(*_: Any, **__: Any) -> None:
    """Log and print nothing."""


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import the callback, and with it the library, at first use (PEP 562)."""
        if name == "AutobatchFinder":
            return import_module("autobatch.integrations.lightning_callback").AutobatchFinder
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
