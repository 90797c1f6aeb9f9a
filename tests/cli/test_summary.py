"""The result in words: the split, the gain, the learning rate, the training, and the final lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from autobatch.cli.summary import (
    LIMITS,
    describe_plan,
    describe_probe,
    describe_rate,
    describe_tuning,
    summary_lines,
)
from autobatch.core.records import LimitedBy, Tuning
from autobatch.planning import make_plan
from autobatch.report.result import Result
from tests.support.sample_run import a_device, a_probe, a_run, some_rates

TUNING = Tuning(trials=4, best={}, baseline_samples_per_s=1000.0, best_samples_per_s=1370.0, study="s")


@pytest.mark.parametrize("limit", LimitedBy.__args__)  # type: ignore[attr-defined]
def test_every_limit_has_words(limit: str) -> None:
    probe = msgspec.structs.replace(a_probe(), limited_by=limit)
    assert describe_probe(probe) == ("largest", f"micro-batch 93, limited by {LIMITS[limit]}")


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({}, "1,024 = 4 × 86 + 8 × 85, fp32, learning rate 0.1"),
        ({"world_size": 2}, "1,024 = 2 × 86 + 4 × 85 on each of 2 ranks, fp32, learning rate 0.1"),
        ({"target_batch": 93}, "93 = 1 × 93, fp32, learning rate 0.1"),
        (
            {"rule": "sqrt", "base_batch": 256, "precision": "bf16"},
            "1,024 = 4 × 86 + 8 × 85, bf16, learning rate 0.2 (sqrt rule, × 2)",
        ),
    ],
)
def test_the_split_adds_up_to_the_batch(numbers: dict[str, Any], words: str) -> None:
    plan = make_plan(**{"target_batch": 1024, "micro_batch_limit": 93, "learning_rate": 0.1, **numbers})
    assert describe_plan(plan) == words


def test_the_choices_of_the_tuner_are_part_of_the_plan() -> None:
    plan = make_plan(target_batch=8, micro_batch_limit=8, learning_rate=0.1)
    tuned = msgspec.structs.replace(
        plan,
        knobs={"optimizer": "fused"},
        learning_rate=0.3,
        learning_rate_rule="tuned",
        learning_rate_factor=3.0,
    )
    assert describe_plan(tuned) == "8 = 1 × 8, fp32, optimizer fused, learning rate 0.3 (tuned, × 3)"


@pytest.mark.parametrize(
    ("best", "baseline", "words"),
    [
        (1370.0, 1000.0, "1,370 samples/s, 1.37 × the default (1,000 samples/s)"),
        (1000.0, 1000.0, "kept the default, 1,000 samples/s"),
        (900.0, 0.0, "kept the default, 900 samples/s"),
        (0.0, 0.0, "kept the default: it could not be measured"),
    ],
)
def test_the_gain_is_named_only_if_there_is_one(best: float, baseline: float, words: str) -> None:
    tuning = msgspec.structs.replace(TUNING, best_samples_per_s=best, baseline_samples_per_s=baseline)
    assert describe_tuning(tuning) == words


def test_a_new_learning_rate_is_compared_with_the_default() -> None:
    found = some_rates()
    tried = "6 learning rates tried in runs of 40 steps"
    assert describe_rate(found) == f"0.0009 (loss 1.1) instead of 0.0003 (loss 1.31): {tried}"
    diverged = msgspec.structs.replace(found, default_loss=None)
    assert describe_rate(diverged) == f"0.0009 (loss 1.1) instead of 0.0003 (no loss): {tried}"
    kept = msgspec.structs.replace(found, best=found.default)
    assert describe_rate(kept) == f"kept 0.0003: {tried}"


def test_the_final_lines_name_every_stage_that_ran_and_every_file() -> None:
    run = a_run()
    result = Result(
        device=run.device,
        probe=run.probe,
        plan=run.plan,
        tuning=run.tuning,
        training=msgspec.structs.replace(run.training, noise_advice="the batch is large enough"),
        report=Path("runs/x/report.html"),
        profile=Path("profiles/gpu/limits/1.json"),
        command="autobatch fit",
    )
    lines = summary_lines(result)
    assert [label for label, _ in lines] == [
        "largest", "plan", "tuned", "rate", "trained", "noise", "checkpoint", "report", "saved", "repeat",
    ]  # fmt: skip
    shown = dict(lines)
    assert shown["trained"].startswith("120 steps, 122,880 samples at 1,824/s, loss 2.4212 → 0.3618")
    assert shown["saved"] == "profiles/gpu/limits/1.json"
    assert shown["repeat"] == "autobatch fit"


def test_only_the_learning_rate_was_tuned() -> None:
    rate_only = msgspec.structs.replace(TUNING, trials=0, learning_rate=some_rates())
    result = Result(device=a_device(), tuning=rate_only)
    assert [label for label, _ in summary_lines(result)] == ["rate"]
