"""The callback of a Lightning ``Trainer`` that plans when ``fit`` begins."""

from __future__ import annotations

from functools import partial
from typing import Any, Unpack

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:  # the same library under its older name
    from pytorch_lightning.callbacks import Callback

from autobatch.core.keywords import PlanKeywords
from autobatch.integrations import lightning as adapter
from autobatch.integrations.library_plan import LibraryPlan, logger, tell_plan


class AutobatchFinder(Callback):  # type: ignore[misc]
    """A callback in place of ``BatchSizeFinder``: it plans before ``fit`` reads the data, and logs the plan.

    Args:
        target_batch: samples per optimizer step, over all ranks.
        options: those of `autobatch.plan`.
    """

    def __init__(self, *, target_batch: int, **options: Unpack[PlanKeywords]) -> None:
        self._plan = partial(adapter.plan_fit, target_batch=target_batch, **options)
        self.plan: LibraryPlan | None = None
        """The plan; None before ``fit``."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Plan once, before the loaders are made and the model is moved."""
        if stage != "fit" or self.plan is not None:
            return
        source = trainer.fit_loop._data_source
        data = trainer.datamodule if source.is_module() else source.instance
        self.plan = self._plan(trainer, pl_module, data)
        if not source.is_module():  # fit got a loader
            source.instance = self.plan.loader

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Log the plan, and let a resumed epoch begin with a whole step.

        A checkpoint of another plan has counted micro-batches of another size.
        """
        del pl_module
        if self.plan is None:
            return
        tell_plan(self.plan, is_first=trainer.is_global_zero)
        figures = {"target_batch": self.plan.target_batch, "micro_batch": self.plan.micro_batch}
        for tracker in trainer.loggers:
            tracker.log_hyperparams({f"autobatch/{name}": value for name, value in figures.items()})
        loop, steps = trainer.fit_loop.epoch_loop, self.plan.accumulation_steps
        read = loop.batch_progress.current
        done = loop.automatic_optimization.optim_progress.optimizer.step.current.completed
        behind = done * steps - read.ready
        if not loop.restarting or loop.batch_progress.is_last_batch or not behind:
            return
        logger.warning(
            f"Lightning: the checkpoint is from {done} steps and {read.ready} micro-batches within an epoch, "
            f"which count as {done * steps} micro-batches of this plan, so that its steps are whole"
        )
        for name in ("ready", "started", "processed", "completed"):
            setattr(read, name, getattr(read, name) + behind)
