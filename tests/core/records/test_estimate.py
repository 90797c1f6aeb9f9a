"""The records of an estimate: the keys of the JSON that users rely on."""

from __future__ import annotations

from autobatch.core.records.estimate import Estimate


def test_the_keys_of_estimate() -> None:
    assert {
        "profile",
        "budget_bytes",
        "micro_batch",
        "micro_batch_low",
        "micro_batch_high",
        "peak_allocated_bytes",
        "peak_reserved_bytes",
        "seconds",
        "plan",
    } <= set(Estimate.__struct_fields__)
