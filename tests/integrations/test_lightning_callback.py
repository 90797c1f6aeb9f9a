"""The callback in place of Lightning's BatchSizeFinder."""

from __future__ import annotations

import logging

import pytest

from autobatch.integrations import lightning
from tests.integrations.test_lightning import quiet_and_at_home
from tests.support.libraries import installed

__all__ = ["quiet_and_at_home"]


def test_the_callback_plans_before_the_data_are_read(caplog: pytest.LogCaptureFixture) -> None:
    installed("lightning")
    from tests.support.lightning_modules import Classifier, Points, Quiet

    finder = lightning.AutobatchFinder(target_batch=20, memory_budget="14KiB")
    trainer, data = Quiet(max_epochs=2, callbacks=[finder]), Points()
    with caplog.at_level(logging.INFO, logger="autobatch"):
        trainer.fit(Classifier(), data)
    plan = finder.plan
    assert plan is not None
    assert plan.accumulation_steps > 1
    assert data.batch_size == plan.micro_batch
    assert trainer.accumulate_grad_batches == plan.accumulation_steps
    assert trainer.global_step == 4
    assert str(plan) in "\n".join(caplog.messages)
