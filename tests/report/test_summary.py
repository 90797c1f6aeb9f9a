"""The result in words: the limit, the split, the gain, the training, and the final lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from autobatch.core.records.plan import RunOrder
from autobatch.core.records.probe import LimitedBy, RankLimit
from autobatch.core.records.tuning import Trial, TrialComparison, Tuning
from autobatch.planning import make_plan
from autobatch.report.result import Result
from autobatch.report.sentences import run_order_in_words
from autobatch.report.summary import (
    CAPS,
    describe_fit,
    describe_limit,
    describe_plan,
    describe_rate,
    describe_reached,
    describe_training,
    describe_trial,
    describe_tuning,
    summary_lines,
)
from tests.support.sample_run import a_device, a_probe, a_run, some_rates

TUNING = Tuning(
    trials=4, best={}, baseline_samples_per_s=1000.0, best_samples_per_s=1370.0, study="s", seconds=10.0
)


@pytest.mark.parametrize("limit", LimitedBy.__args__)  # type: ignore[attr-defined]
def test_every_cap_has_words(limit: str) -> None:
    probe = msgspec.structs.replace(a_probe(), limited_by=limit, upper_bound_by="cap")
    assert describe_limit(probe) == f"93 samples fit at a time; {CAPS[limit]}"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "93 samples fit at a time; 94 ran and do not"),
        ({"upper_bound_by": "replay"}, "93 samples fit at a time; 94 do not (predicted from 6 test runs)"),
        (
            {"upper_bound_by": None, "stopped_by": "time limit"},
            "93 samples fit at a time; more may: the time limit ended the search",
        ),
        (
            {"source": "saved 2026-11-21"},
            "93 samples still fit at a time (saved on 2026-11-21, confirmed by one run)",
        ),
        ({"source": "asked", "micro_batch": 1}, "1 sample fits at a time"),
    ],
)
def test_the_limit_comes_with_its_evidence(changes: dict[str, Any], words: str) -> None:
    assert describe_limit(msgspec.structs.replace(a_probe(), **changes)) == words


@pytest.mark.parametrize(
    ("limits", "parallel", "words"),
    [
        ([93, 93], "replicate", "93 samples fit at a time on each of 2 ranks"),
        ([93, 12, 93], "replicate", "93 samples fit at a time on rank 0, and 93, 12 on others"),
        ([93, 93], "shard", "93 samples fit at a time on each of 2 ranks, which share the model"),
    ],
)
def test_the_limit_of_ranks_names_them(limits: list[int], parallel: str, words: str) -> None:
    ranks = [RankLimit(rank=n, host="h", device="d", kind=0, limit=one) for n, one in enumerate(limits)]
    changes: dict[str, Any] = {"ranks": ranks, "parallel": parallel, "upper_bound_by": None}
    assert describe_limit(msgspec.structs.replace(a_probe(), **changes)) == words


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({}, "batch 1,024 in 12 micro-batches (4 × 86, 8 × 85) · fp32 · lr 0.1"),
        (
            {"world_size": 2},
            "batch 1,024 in 6 micro-batches (2 × 86, 4 × 85) on each of 2 ranks · fp32 · lr 0.1",
        ),
        ({"target_batch": 93}, "batch 93 in 1 micro-batch of 93 · fp32 · lr 0.1"),
        (
            {"rule": "sqrt", "base_batch": 256, "precision": "bf16"},
            "batch 1,024 in 12 micro-batches (4 × 86, 8 × 85) · bf16 · lr 0.2 (sqrt rule, × 2)",
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
        knobs={"optimizer": "fused", "channels_last": True, "loader_workers": 2, "pin_memory": False},
        learning_rate=0.3,
        learning_rate_rule="tuned",
        learning_rate_factor=3.0,
    )
    assert describe_plan(tuned) == (
        "batch 8 in 1 micro-batch of 8 · fp32 · fused optimizer, channels-last, 2 loader workers, "
        "no pin-memory · lr 0.3 (tuned, × 3)"
    )


def test_a_limit_of_another_configuration_is_not_shown_beside_the_plan() -> None:
    """The probe ran in fp32; the tuned plan trains in bf16, where more fits."""
    plan = make_plan(target_batch=1024, micro_batch_limit=342, learning_rate=0.1, precision="bf16")
    probe = msgspec.structs.replace(a_probe(), precision="fp32")
    words = describe_fit(a_run(plan=plan, probe=probe))
    assert words == "342 samples at a time in 6.00 GiB, in the planned configuration"
    same = make_plan(target_batch=1024, micro_batch_limit=93, learning_rate=0.1)
    assert (
        describe_fit(a_run(plan=same, probe=probe)) == "93 samples at a time in 6.00 GiB; 94 ran and do not"
    )
    slow = msgspec.structs.replace(same, knobs={"checkpointing": "full"})
    assert "93" not in describe_fit(a_run(plan=slow, probe=probe))


@pytest.mark.parametrize(
    ("trial", "words"),
    [
        ({"samples_per_s": 1234.5, "relative": 1.25}, "bf16: 1,234 samples/s (25 % faster)"),
        ({"samples_per_s": 1234.5, "relative": 0.98}, "bf16: 1,234 samples/s (2 % slower)"),
        ({"samples_per_s": None, "feasible": False, "note": "too large"}, "bf16: left out, too large"),
    ],
)
def test_a_trial_names_what_differs_from_the_default(trial: dict[str, Any], words: str) -> None:
    assert describe_trial(Trial(number=1, **trial), {"precision": "bf16"}) == words
    assert describe_trial(Trial(number=0, samples_per_s=10.0), {}) == "default: 10 samples/s"


@pytest.mark.parametrize(
    ("best", "baseline", "words"),
    [
        (1370.0, 1000.0, "1,370 samples/s: 37 % faster than the default (1,000)"),
        (1000.0, 1000.0, "kept the default, 1,000 samples/s"),
        (900.0, 0.0, "kept the default, 900 samples/s"),
        (0.0, 0.0, "kept the default: it could not be measured"),
    ],
)
def test_the_gain_is_named_only_if_there_is_one(best: float, baseline: float, words: str) -> None:
    tuning = msgspec.structs.replace(TUNING, best_samples_per_s=best, baseline_samples_per_s=baseline)
    assert describe_tuning(tuning) == words


def test_a_gain_comes_with_its_interval_and_when_it_has_paid_for_the_search() -> None:
    """A step of 1,000 samples takes 1 s, or 1 ÷ 1.37 s: 10 s are saved in 10 ÷ 0.27 = 37.03 steps."""
    chosen = TrialComparison(
        changes={"precision": "bf16"}, ratio=1.37, low=1.29, high=1.45, rounds=3, chosen=True
    )
    tuning = msgspec.structs.replace(TUNING, comparisons=[chosen])
    plan = make_plan(target_batch=1000, micro_batch_limit=8, learning_rate=0.1)
    assert describe_tuning(tuning, plan, 20) == (
        "1,370 samples/s: 37 % faster than the default (1,000), 95 % interval 29 % to 45 %; "
        "pays back after 38 steps; this run has 20"
    )


def test_a_new_learning_rate_is_compared_with_the_default() -> None:
    found = some_rates()
    tried = "6 learning rates tried in runs of 40 steps"
    assert describe_rate(found) == f"0.0009 (loss 1.1) instead of 0.0003 (loss 1.31): {tried}"
    diverged = msgspec.structs.replace(found, default_loss=None)
    assert describe_rate(diverged) == f"0.0009 (loss 1.1) instead of 0.0003 (no loss): {tried}"
    kept = msgspec.structs.replace(found, best=found.default)
    assert describe_rate(kept) == f"kept 0.0003: {tried}"


def test_the_training_says_what_it_reached() -> None:
    training = msgspec.structs.replace(
        a_run().training, validation={"loss": 0.5, "accuracy": 0.9722, "x": None}
    )
    assert describe_reached(training) == "held-out accuracy 97.22 %, x not finite, loss 0.5"
    assert describe_reached(msgspec.structs.replace(training, ema=0.99)).endswith("of the averaged weights")
    assert (
        describe_reached(msgspec.structs.replace(training, validation={})) == "training loss 2.4212 → 0.3618"
    )
    assert describe_training(training) == (
        "120 steps, 122,880 samples, 1,824 samples/s, loss 2.4212 → 0.3618, 1 recovery from out of memory"
    )
    assert "loss" not in describe_training(training, with_loss=False)


def test_four_lines_answer_and_the_others_give_the_details() -> None:
    run = a_run()
    result = Result(
        device=run.device,
        probe=run.probe,
        plan=run.plan,
        tuning=run.tuning,
        training=msgspec.structs.replace(run.training, noise_advice="the batch is large enough"),
        out=Path("runs/x"),
        report=Path("runs/x/report.html"),
        profile=Path("profiles/gpu/limits/1.json"),
        command="autobatch fit",
    )
    lines = summary_lines(result, out=result.out, report=result.report)
    assert [(line.label, line.kind) for line in lines] == [
        ("fits", "main"), ("plan", "main"), ("reached", "main"), ("saved in", "main"), ("tuned", "detail"),
        ("rate", "detail"), ("trained", "detail"), ("noise", "detail"), ("report", "path"),
        ("run again", "detail"),
    ]  # fmt: skip
    shown = {line.label: line.text for line in lines}
    assert shown["reached"] == "held-out accuracy 93.12 %"
    assert shown["saved in"] == "runs/x"
    assert shown["run again"] == "autobatch fit"


def test_only_the_learning_rate_was_tuned() -> None:
    rate_only = msgspec.structs.replace(TUNING, trials=0, learning_rate=some_rates())
    result = Result(device=a_device(), tuning=rate_only)
    assert [line.label for line in summary_lines(result)] == ["rate"]


def test_a_micro_batch_for_one_order_is_told_from_what_fits_in_any() -> None:
    plan = make_plan(target_batch=96, micro_batch_limit=32, learning_rate=0.1)
    order = RunOrder(batches=500, by="replay", micro_batch_in_any_order=12)
    run = a_run(
        plan=msgspec.structs.replace(plan, run_order=order),
        probe=msgspec.structs.replace(a_probe(), precision="fp32"),
    )
    assert describe_fit(run) == "32 samples at a time in 6.00 GiB, in the order of this run"
    assert run_order_in_words(plan) == ""
    assert run_order_in_words(run.plan) == (
        "A micro-batch of 32 fits in the order of this run: all of its 500 batches are known, and the "
        "heaviest ones ran. For any order, the plan would have 12."
    )
