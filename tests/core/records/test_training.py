"""The records of a training: the keys of the JSON that users rely on."""

from __future__ import annotations

from autobatch.core.records.training import Training


def test_the_keys_of_training() -> None:
    assert {
        "optimizer_steps",
        "samples",
        "samples_per_s",
        "first_loss",
        "final_loss",
        "oom_recoveries",
        "resumed_from",
        "checkpoint",
    } <= set(Training.__struct_fields__)
