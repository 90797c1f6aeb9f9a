"""Lightning: a callback that plans when ``fit`` begins, in place of Lightning's ``BatchSizeFinder``.

    from autobatch.integrations.lightning import AutobatchFinder

    trainer = Trainer(max_epochs=1, callbacks=[AutobatchFinder(target_batch=16)])
    trainer.fit(module, datamodule)

``training_step`` is the loss and ``configure_optimizers`` makes the optimizer, so nothing is written twice.
The batch size goes to the attribute ``batch_size`` of the data module (or of the module, or of ``hparams``),
from which ``train_dataloader`` must read it. A loader that ``fit`` got is made again with the planned size.

Its loop is less exact than autobatch, as the notes of the plan and ``docs/loops.md`` say.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from autobatch.core.errors import InputError
from autobatch.core.options import Keywords
from autobatch.core.records import Precision
from autobatch.integrations.library_plan import (
    LibraryLoop,
    check_resizable,
    on_host,
    plan_for,
    precision_of,
    resize,
)
from autobatch.report.result import PlanResult
from autobatch.workload.contract import Workload, kind_of, parts_of
from autobatch.workload.rng import preserved_random_state

try:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.loggers.logger import DummyLogger
    from lightning.pytorch.utilities import rank_zero_info
except ImportError:  # the same library under its older name
    from pytorch_lightning.callbacks import Callback
    from pytorch_lightning.loggers.logger import DummyLogger
    from pytorch_lightning.utilities import rank_zero_info

__all__ = ["AutobatchFinder", "workload"]

_PRECISIONS: dict[str, Precision] = {"32-true": "fp32", "bf16-mixed": "bf16", "16-mixed": "fp16"}


class AutobatchFinder(Callback):  # type: ignore[misc]
    """A callback that plans before ``fit`` reads the data, sets the plan, and logs it.

    ``fit`` then raises an `InputError` if the module trains in a way that a plan cannot describe, and a
    `DoesNotFitError` if not even a micro-batch of 1 fits.

    Args:
        target_batch: samples per optimizer step, over all ranks.
        options: those of `autobatch.plan`, such as ``memory_budget``. Precision, clipping and device are the
            trainer's.
    """

    def __init__(self, *, target_batch: int, **options: Unpack[Keywords]) -> None:
        self.target_batch = target_batch
        self.plan: PlanResult | None = None
        """The plan; None before ``fit``."""
        self._options = options

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Plan once, before the loaders are made and the model is moved."""
        if stage != "fit" or self.plan is not None:
            return
        source = trainer.fit_loop._data_source
        given = None if source.is_module() else source.instance
        if given is not None:
            check_resizable(given)
        else:
            _holder_of_batch_size(pl_module, trainer.datamodule)
        options = self._options.copy()
        options.setdefault("precision", precision_of(str(trainer.precision), _PRECISIONS, "Lightning"))
        if trainer.gradient_clip_val and str(trainer.gradient_clip_algorithm or "norm") == "norm":
            options.setdefault("max_grad_norm", float(trainer.gradient_clip_val))
        loop = LibraryLoop(
            name="Lightning", world_size=trainer.world_size, device=trainer.strategy.root_device
        )
        with on_host(pl_module), preserved_random_state():
            module, data = _outside_of_fit(pl_module, trainer), copy.copy(trainer.datamodule)
            maker = module if data is None else data
            loader = maker.train_dataloader() if given is None else given
            self.plan = plan_for(workload(module, loader), loop, self.target_batch, **options)
            size = self.plan.micro_batch
            if given is not None:
                resize(given, size)
            else:
                for owners in ((module, data), (pl_module, trainer.datamodule)):
                    _holder_of_batch_size(*owners).batch_size = size
                if (found := maker.train_dataloader().batch_size) != size:
                    raise InputError(
                        f"train_dataloader made a loader of {found} samples, after batch_size was set to "
                        f"{size}: let it read self.batch_size"
                    )
        trainer.accumulate_grad_batches = self.plan.accumulation_steps

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Tell the plan."""
        if self.plan is not None:
            rank_zero_info(f"autobatch: {self.plan}")


def workload(module: Any, loader: DataLoader[Any]) -> Workload:
    """Build the workload that a ``LightningModule`` trains on the data of a loader.

    Raises:
        InputError: ``training_step`` calls backward itself, or ``configure_optimizers`` returns not one
            optimizer.
    """
    optimizers = _configured(module)
    if not module.automatic_optimization or len(optimizers) > 1:
        is_manual = not module.automatic_optimization
        what = "automatic_optimization=False" if is_manual else f"{len(optimizers)} optimizers"
        raise InputError(
            f"{kind_of(module)} has {what}, so its training_step calls backward: use autobatch.batches, one "
            "for each optimizer (docs/loops.md)"
        )
    parts = parts_of(loader)
    return Workload(
        model=lambda: module,
        train_data=parts["train_data"],
        collate=parts["collate"],
        loss=_loss,
        optimizer=lambda model, _: _configured(model),
        learning_rate=float(optimizers[0].param_groups[0]["lr"]),
        name=type(module).__name__,
    )


def _loss(module: Any, batch: Any) -> Tensor:
    """Run ``training_step``, after the hooks around the transfer of a batch, which may augment it."""
    datamodule = getattr(getattr(module, "_trainer", None), "datamodule", None)
    for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
        # The last base class defines it to do nothing.
        has_own = sum(hook in vars(kind) for kind in type(datamodule).__mro__) > 1
        batch = getattr(datamodule if has_own else module, hook)(batch, 0)
    takes = [batch, 0][: len(inspect.signature(module.training_step).parameters)]
    found = module.training_step(*takes)
    loss = found.get("loss") if isinstance(found, dict) else found
    if not isinstance(loss, Tensor):
        raise InputError(f"training_step must return a loss, or a dict with 'loss', found {kind_of(found)}")
    return loss


def _configured(module: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers among the many forms that ``configure_optimizers`` may return."""
    made = module.configure_optimizers()
    several = made if isinstance(made, list | tuple) else [made]
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], list | tuple):
        several = made[0]  # the others are schedules
    optimizers = [each["optimizer"] if isinstance(each, dict) else each for each in several]
    if not optimizers or not all(isinstance(each, torch.optim.Optimizer) for each in optimizers):
        raise InputError(f"configure_optimizers must return an optimizer, found {kind_of(made)}")
    return optimizers


def _holder_of_batch_size(module: Any, datamodule: Any) -> Any:
    """Return the object whose attribute ``batch_size`` the loader is made with."""
    owners = [owner for owner in (datamodule, module) if owner is not None]
    for owner in owners:
        for holder in (owner, getattr(owner, "hparams", None)):
            if holder is not None and hasattr(holder, "batch_size"):
                return holder
    raise InputError(
        f"there is no attribute batch_size, which the plan sets, in {' or '.join(map(kind_of, owners))}: set "
        "self.batch_size and let train_dataloader read it, or give the loader to fit"
    )


def _outside_of_fit(module: Any, trainer: Any) -> Any:
    """Return a copy of a module whose hooks run although ``fit`` is not that far, and which logs nothing.

    ``fit`` sets up the module and builds its layers later.
    """
    copied = copy.deepcopy(module)
    outside = _Outside(trainer)
    copied._trainer = outside
    copied.log = copied.log_dict = copied.print = lambda *_, **__: None
    copied.setup("fit")
    copied.configure_model()
    outside.optimizers = _configured(copied)
    copied.optimizers = lambda use_pl_optimizer=True: outside.optimizers[0]
    return copied


class _Outside:
    """A trainer outside of ``fit``, which logs nothing.

    Args:
        trainer: whose other attributes are passed on.
    """

    estimated_stepping_batches = 1000

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.loggers = [DummyLogger() for _ in trainer.loggers]
        self.logger = self.loggers[0] if self.loggers else None
        self.optimizers: list[torch.optim.Optimizer] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)
