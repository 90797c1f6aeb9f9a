"""The records of a probe: the keys of the JSON that users rely on."""

from __future__ import annotations

from autobatch.core.records.probe import Attempt, Probe


def test_the_keys_of_probe() -> None:
    assert {
        "micro_batch",
        "limited_by",
        "upper_bound_by",
        "predicted_micro_batch",
        "oom_count",
        "attempts",
    } <= set(Probe.__struct_fields__)


def test_the_keys_of_attempt() -> None:
    assert {
        "micro_batch",
        "fits",
        "peak_allocated_bytes",
        "peak_reserved_bytes",
        "seconds",
    } <= set(Attempt.__struct_fields__)
