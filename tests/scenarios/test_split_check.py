"""A fit checks that the loss can be split before it trains."""

from __future__ import annotations

from pathlib import Path

import pytest

import autobatch
from autobatch.core.errors import InputError
from tests.support.training import contrastive_loss, make_workload


def test_fit_checks_the_loss_before_it_trains(tmp_path: Path) -> None:
    """The check also runs after a probe that found the micro-batch to fit."""
    options = {
        "target_batch": 24,
        "max_micro_batch": 8,
        "steps": 1,
        "trials": 0,
        "device": "cpu",
        "memory_budget": "64MiB",
        "out": str(tmp_path / "run"),
    }
    with pytest.raises(InputError, match="depends on several samples at once"):
        autobatch.fit(make_workload(loss=contrastive_loss), **options)
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert autobatch.fit(make_workload(), **options).training.optimizer_steps == 1


def test_a_loss_that_cannot_be_split_is_trained_if_asked_for(tmp_path: Path) -> None:
    options = {"device": "cpu", "memory_budget": "1GiB", "target_batch": 24, "steps": 1, "trials": 0}
    options |= {"max_micro_batch": 8, "out": str(tmp_path / "run")}
    workload = make_workload(loss=contrastive_loss)
    with pytest.raises(InputError, match=r"depends on several samples at once .* use --split-check note"):
        autobatch.fit(workload, **options)
    for choice in ("note", "off"):
        assert autobatch.fit(workload, split_check=choice, **options).training.optimizer_steps == 1
