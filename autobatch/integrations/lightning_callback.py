"""A callback that plans for its Lightning ``Trainer`` when ``fit`` begins."""

from __future__ import annotations

from functools import partial
from typing import Any, Unpack

from lightning.pytorch.callbacks import Callback

from autobatch.core.keywords import PlanKeywords
from autobatch.integrations import lightning as adapter
from autobatch.integrations.library_plan import LibraryPlan, tell_plan


class AutobatchFinder(Callback):  # type: ignore[misc]
    """A callback in place of ``BatchSizeFinder``: it plans before ``fit`` reads the data, and logs the plan.

    Args:
        target_batch: samples per optimizer step, over all ranks.
        options: those of `autobatch.plan`.
    """

    def __init__(self, *, target_batch: int, **options: Unpack[PlanKeywords]) -> None:
        self._plan = partial(adapter.plan, target_batch=target_batch, **options)
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
        """Log the plan, for people and for the loggers of the trainer."""
        del pl_module
        if self.plan is None:
            return
        tell_plan(self.plan, is_first=trainer.is_global_zero)
        figures = {"target_batch": self.plan.target_batch, "micro_batch": self.plan.micro_batch}
        for logger in trainer.loggers:
            logger.log_hyperparams({f"autobatch/{name}": value for name, value in figures.items()})
