"""The choice of a tuner in a plan."""

from __future__ import annotations

from typing import Any

import pytest

from autobatch.core.knobs import SearchAxis
from autobatch.core.records.tuning import LrTuning, Tuning
from autobatch.planning import make_plan
from autobatch.tuning.apply_choice import with_choice, with_learning_rate
from autobatch.tuning.configuration import Measurement
from autobatch.tuning.find_fastest import TuningResult

AXES = [SearchAxis("micro_batch_shift", (0, 1)), SearchAxis("precision", ("fp32", "bf16"))]


def result(best: dict[str, Any], micro_batch: int) -> TuningResult:
    tuning = Tuning(trials=1, best=best, baseline_samples_per_s=1.0, best_samples_per_s=2.0, study="s")
    return TuningResult(tuning, Measurement(2.0, micro_batch))


def test_a_choice_changes_the_split_and_the_precision_but_not_the_batch() -> None:
    plan = make_plan(target_batch=20, micro_batch_limit=8, learning_rate=0.1)
    assert plan.micro_batches == [7, 7, 6]
    chosen = with_choice(plan, result({"micro_batch_shift": 1, "precision": "bf16"}, 4), AXES)
    assert (chosen.micro_batches, chosen.micro_batch, chosen.accumulation_steps) == ([4] * 5, 4, 5)
    assert (chosen.precision, chosen.knobs, chosen.effective_batch) == ("bf16", {}, 20)


def test_the_default_leaves_the_plan_unchanged() -> None:
    plan = make_plan(target_batch=20, micro_batch_limit=8, learning_rate=0.1)
    assert with_choice(plan, result({"micro_batch_shift": 0, "precision": "fp32"}, 7), AXES) is plan


def test_a_kept_learning_rate_leaves_the_plan_unchanged() -> None:
    plan = make_plan(target_batch=8, micro_batch_limit=4, learning_rate=0.1)
    stays = LrTuning(trials=1, steps=4, default=0.1, best=0.1, default_loss=1.0, best_loss=1.0, study="s")
    assert with_learning_rate(plan, stays, declared=0.1) is plan


def test_a_better_learning_rate_is_put_into_the_plan_with_its_factor() -> None:
    plan = make_plan(target_batch=8, micro_batch_limit=4, learning_rate=0.1)
    found = LrTuning(trials=3, steps=4, default=0.1, best=0.4, default_loss=1.0, best_loss=0.5, study="s")
    chosen = with_learning_rate(plan, found, declared=0.05)
    assert (chosen.learning_rate, chosen.learning_rate_rule) == (0.4, "tuned")
    assert chosen.learning_rate_factor == pytest.approx(8)
