"""The sentences of a report, word for word."""

from __future__ import annotations

import msgspec
import pytest

from autobatch.core.records.plan import RankPlan, SizeCut
from autobatch.core.records.tuning import LrTuning, Tuning
from autobatch.planning import make_plan
from autobatch.report.sentences import (
    budget_in_words,
    fits_in_words,
    headline,
    rate_in_words,
    rates_in_words,
    split_in_words,
    training_in_words,
    tuning_in_words,
)
from autobatch.report.summary import describe_split
from tests.support.sample_run import a_device, a_probe, a_run, some_rates


def test_the_headline_names_the_last_part_that_ran():
    assert headline(a_run()) == (
        "120 optimizer steps of exactly 1,024 samples in 6.00 GiB on NVIDIA GeForce RTX 4090. "
        "Held-out accuracy 93.12 %."
    )
    assert headline(a_run(training=None)) == (
        "Each optimizer step takes exactly 1,024 samples in 6.00 GiB on NVIDIA GeForce RTX 4090: "
        "4 micro-batches of 86 and 8 of 85."
    )
    probed = a_run(training=None, plan=None)
    assert headline(probed) == (
        "93 is the largest micro-batch that fits in 6.00 GiB on NVIDIA GeForce RTX 4090."
    )
    bare = a_run(training=None, plan=None, probe=None)
    assert headline(bare) == "The memory budget is 6.00 GiB on NVIDIA GeForce RTX 4090."


def test_the_headline_names_the_training_loss_only_without_held_out_data():
    training = msgspec.structs.replace(a_run().training, validation={})
    assert headline(a_run(training=training)).endswith("The training loss went from 2.421 to 0.3618.")


def test_the_headline_leaves_out_an_unknown_loss():
    training = msgspec.structs.replace(a_run().training, first_loss=None, validation={})
    assert headline(a_run(training=training)).endswith("on NVIDIA GeForce RTX 4090.")


def test_the_split_of_one_rank():
    plan = make_plan(
        target_batch=8, micro_batch_limit=4, learning_rate=0.1, world_size=2, base_batch=2, rule="sqrt"
    )
    assert split_in_words(plan) == "1 micro-batch of 4 on each of 2 ranks"
    uneven = make_plan(target_batch=7, micro_batch_limit=2, learning_rate=0.1, world_size=2)
    assert split_in_words(uneven) == "2 micro-batches of 2 on each of 2 ranks, or one sample less"
    cut = SizeCut(sizes=[9.0], micro_batches=[2], limits_by="longest", steps=1.5)
    by_size = msgspec.structs.replace(uneven, size_cut=cut)
    words = "about 1.5 micro-batches, cut at the sizes of their samples"
    assert split_in_words(by_size) == f"{words}, on each of 2 ranks"
    assert split_in_words(msgspec.structs.replace(by_size, world_size=1)) == words
    assert describe_split(by_size) == "about 1.5 micro-batches, cut by size, on each of 2 ranks"


def test_the_split_of_unlike_ranks():
    plan = make_plan(target_batch=501, micro_batch_limit=323, learning_rate=0.1, world_size=4)
    of_ranks = [(0, 323, [139]), (0, 323, [139]), (1, 102, [102, 101]), (2, 20, [])]
    ranks = [
        RankPlan(rank=rank, host="a", device="b", kind=kind, limit=limit, samples=sum(own), micro_batches=own)
        for rank, (kind, limit, own) in enumerate(of_ranks)
    ]
    plan = msgspec.structs.replace(plan, ranks=ranks, micro_batches=[139])
    assert split_in_words(plan) == (
        "1 micro-batch of 139 on 2 ranks, 1 micro-batch of 102 and 1 of 101 on 1 rank, "
        "no micro-batch on 1 rank"
    )
    assert describe_split(plan) == (
        "1 micro-batch of 139 on 2 ranks, 2 micro-batches (1 × 102, 1 × 101) on 1 rank, "
        "0 micro-batches on 1 rank"
    )


@pytest.mark.parametrize(
    ("rule", "factor", "words"),
    [
        ("none", 1.0, "0.2, source"),
        ("sqrt", 2.0, "0.2, 2 times the declared rate by the sqrt rule (source)"),
        ("tuned", 2.0, "0.2, 2 times the declared rate (source)"),
    ],
)
def test_the_learning_rate_names_its_rule_factor_and_source(rule, factor, words):
    plan = msgspec.structs.replace(
        a_run().plan,
        learning_rate=0.2,
        learning_rate_rule=rule,
        learning_rate_factor=factor,
        learning_rate_source="source",
    )
    assert rate_in_words(plan) == words
    bare = rate_in_words(msgspec.structs.replace(plan, learning_rate_source=""))
    assert bare == ("0.2, as declared" if rule == "none" else words[: -len(" (source)")])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {},
            "A micro-batch of 93 ran and fits. 94 ran and did not fit. "
            "The probe ran 6 sizes with 2 out-of-memory errors.",
        ),
        ({"upper_bound_by": "replay"}, "A replay of the measured footprint shows that 94 does not fit."),
        (
            {"upper_bound_by": "cap", "limited_by": "dataset"},
            "94 was not tried, because 93 is the whole dataset.",
        ),
        (
            {"upper_bound_by": None, "stopped_by": "time limit"},
            "It is unknown whether 94 fits, because the search was stopped (time limit).",
        ),
        (
            {"upper_bound_by": None, "source": "asked"},
            "No larger size was tried, because only this one was requested.",
        ),
        (
            {"source": "saved 2026-11-20"},
            "93 ran and fits. One run confirmed the limit saved on 2026-11-20.",
        ),
        ({"oom_count": 0}, "The probe ran 6 sizes with no out-of-memory error."),
    ],
)
def test_the_evidence_for_the_limit(changes, words):
    assert words in fits_in_words(msgspec.structs.replace(a_probe(), **changes))


def test_the_budget_names_its_source_once():
    device = a_device(budget_source="half of the total.")
    assert budget_in_words(device) == "The memory budget is 6.00 GiB of 23.6 GiB (half of the total)."


def a_tuning(**figures) -> Tuning:
    return Tuning(trials=2, best={}, study="", **figures)


@pytest.mark.parametrize(
    ("baseline", "best", "words"),
    [
        (
            1000.0,
            1250.0,
            "the best configuration runs 1,250 samples/s, 25 % faster than the defaults at 1,000",
        ),
        (
            1000.0,
            1000.0,
            "the defaults were kept. They run 1,000 samples/s",
        ),
        (0.0, 0.0, "the defaults were kept, because their throughput was not measured"),
    ],
)
def test_the_gain_of_tuning(baseline, best, words):
    assert tuning_in_words(a_tuning(baseline_samples_per_s=baseline, best_samples_per_s=best)) == (
        f"After 2 trials, {words}."
    )


def test_the_learning_rate_that_was_found():
    found = some_rates()
    tried = "The study tried 6 learning rates in runs of 40 optimizer steps from the same weights."
    assert rates_in_words(found) == (
        "Changed the learning rate from 0.0003 to 0.0009. This gained 15 % of the loss reduction, averaged "
        f"over 3 data orders. {tried}"
    )
    kept: LrTuning = msgspec.structs.replace(found, best=found.default)
    assert rates_in_words(kept) == f"Kept learning rate 0.0003. {tried}"


def test_the_training_run():
    training = a_run().training
    plain = "Trained on 122,880 samples in 67.4 s (1,824 samples/s) with 1 recovery from out of memory."
    assert training_in_words(training) == plain
    skipped = msgspec.structs.replace(training, skipped_steps=2, samples_per_s=None)
    assert training_in_words(skipped) == (
        "Trained on 122,880 samples in 67.4 s with 1 recovery from out of memory. 2 steps were skipped."
    )
