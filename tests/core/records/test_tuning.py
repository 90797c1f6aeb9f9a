"""The records of the tuner: the keys of the JSON that users rely on."""

from __future__ import annotations

from autobatch.core.records.tuning import Tuning


def test_the_keys_of_tuning() -> None:
    assert {
        "trials",
        "best",
        "baseline_samples_per_s",
        "best_samples_per_s",
        "study",
    } <= set(Tuning.__struct_fields__)
