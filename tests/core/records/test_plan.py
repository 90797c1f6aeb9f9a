"""The records of a plan: the keys of the JSON that users rely on."""

from __future__ import annotations

from autobatch.core.records.plan import Plan


def test_the_keys_of_plan() -> None:
    assert {
        "target_batch",
        "effective_batch",
        "world_size",
        "micro_batch",
        "accumulation_steps",
        "micro_batches",
        "base_batch",
        "learning_rate",
        "learning_rate_rule",
        "precision",
    } <= set(Plan.__struct_fields__)
