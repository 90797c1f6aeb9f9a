"""A plan never runs out of memory in training."""

from __future__ import annotations

from pathlib import Path

import pytest

import autobatch
from benchmarks.workloads import WORKLOADS

CASES = {"mlp-heavy": ("6MiB", 2048), "conv": ("8MiB", 512), "gpt": ("24MiB", 256)}
"""Budgets that hold a part of the batch, for a linear, a convolutional and an attention model."""
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "steps", "seed"),
    [
        pytest.param(name, 200 if seed else 10, seed, marks=[SLOW] if seed or name != "conv" else [])
        for name in CASES
        for seed in range(6)
    ],
)
def test_a_plan_trains_to_its_end_within_the_budget(name: str, steps: int, seed: int, tmp_path: Path) -> None:
    """The simulated GPU enforces its budget in training too.

    `tests.probing.test_find_limit` shows that the plan has the largest micro-batch that fits.
    """
    budget, target = CASES[name]
    result = autobatch.fit(
        WORKLOADS[name](),
        target_batch=target,
        device="sim:t4",
        memory_budget=budget,
        steps=steps,
        seed=seed,
        trials=0,
        out=tmp_path / "run",
    )
    assert result.plan is not None
    assert result.training is not None
    assert result.plan.accumulation_steps > 1
    assert result.training.optimizer_steps == steps
    assert result.training.oom_recoveries == 0
