"""A plan never runs out of memory in training."""

from __future__ import annotations

from pathlib import Path

import pytest

import autobatch
from benchmarks.workloads import WORKLOADS

CASES = {"mlp-heavy": ("6MiB", 2048), "conv": ("8MiB", 512), "gpt": ("24MiB", 256)}
"""Budgets that hold a part of the batch, for a linear, a convolutional and an attention model."""


@pytest.mark.parametrize(
    "name", ["conv", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mlp-heavy", "gpt"))]
)
def test_a_plan_trains_to_its_end_within_the_budget(name: str, tmp_path: Path) -> None:
    """The simulated GPU enforces its budget in training too."""
    budget, target = CASES[name]
    options = {"target_batch": target, "device": "sim:t4", "memory_budget": budget, "trials": 0}
    result = autobatch.fit(WORKLOADS[name](), **options, steps=10, out=tmp_path / "run")
    assert result.plan is not None
    assert result.training is not None
    assert result.plan.accumulation_steps > 1
    assert (result.training.optimizer_steps, result.training.oom_recoveries) == (10, 0)
