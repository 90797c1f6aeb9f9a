"""A callback that plans for its ``Trainer`` when training begins."""

from __future__ import annotations

from functools import partial
from typing import Any, Unpack

from transformers import TrainerCallback

from autobatch.core.keywords import PlanKeywords
from autobatch.integrations import transformers as adapter
from autobatch.integrations.library_plan import LibraryPlan, tell_plan


class AutobatchCallback(TrainerCallback):  # type: ignore[misc]
    """A callback that plans for its ``Trainer`` at the start of ``train()``, and logs the plan.

    Args:
        trainer: the trainer to which this callback is added.
        target_batch: samples per optimizer step, over all ranks.
        options: those of `autobatch.plan`.
    """

    def __init__(self, trainer: Any, *, target_batch: int, **options: Unpack[PlanKeywords]) -> None:
        self._trainer = trainer
        self._plan = partial(adapter.plan, trainer, target_batch=target_batch, **options)
        self._open_loader = trainer.get_train_dataloader
        self.plan: LibraryPlan | None = None
        """The plan; None before ``train()``."""
        # train() reads the batch size when it opens the loader, before it calls any callback.
        trainer.get_train_dataloader = self._planned_loader

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log the plan, for people and for the trackers of the trainer."""
        if self.plan is None:
            return
        tell_plan(self.plan, is_first=state.is_world_process_zero)
        figures: dict[str, float] = {
            "autobatch/target_batch": self.plan.target_batch,
            "autobatch/micro_batch": self.plan.micro_batch,
            "autobatch/accumulation_steps": self.plan.accumulation_steps,
        }
        self._trainer.log(figures)

    def _planned_loader(self) -> Any:
        if self.plan is None:
            self._trainer.get_train_dataloader = self._open_loader
            try:
                self.plan = self._plan()
            finally:
                self._trainer.get_train_dataloader = self._planned_loader
        return self._open_loader()
