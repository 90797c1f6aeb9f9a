"""The callback that plans when a Trainer begins to train."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from autobatch.integrations import transformers
from tests.integrations.test_transformers import a_trainer, quiet_and_at_home
from tests.support.trainers import BUDGET

__all__ = ["quiet_and_at_home"]


def test_the_callback_plans_at_the_start_of_train_and_logs_the_plan(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = a_trainer(tmp_path, max_steps=2)
    callback = transformers.AutobatchCallback(trainer, target_batch=24, memory_budget=BUDGET)
    trainer.add_callback(callback)
    assert callback.plan is None
    assert trainer.args.gradient_accumulation_steps == 1
    with caplog.at_level(logging.INFO, logger="autobatch"):
        trainer.train()
    plan = callback.plan
    assert plan is not None
    assert plan.accumulation_steps > 1
    assert trainer.args.gradient_accumulation_steps == plan.accumulation_steps
    assert trainer.args.per_device_train_batch_size == plan.micro_batch
    assert trainer.state.global_step == 2
    assert str(plan) in "\n".join(caplog.messages)
    logged = next(one for one in trainer.state.log_history if "autobatch/micro_batch" in one)
    assert logged["autobatch/micro_batch"] == plan.micro_batch
    trainer.train()
    assert callback.plan is plan
