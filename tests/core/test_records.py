"""The records: immutable, and the same after a trip through JSON."""

from __future__ import annotations

import msgspec
import pytest

from autobatch.core import records
from autobatch.core.records import Record, RunRecord
from tests.support.sample_run import a_device, a_run

CONTRACT = {
    "DeviceRecord": {"kind", "name", "total_bytes", "budget_bytes", "other_processes_bytes"},
    "Probe": {"micro_batch", "limited_by", "upper_bound_by", "predicted_micro_batch", "oom_count",
              "attempts"},
    "Attempt": {"micro_batch", "fits", "peak_allocated_bytes", "peak_reserved_bytes", "seconds"},
    "Plan": {"target_batch", "effective_batch", "world_size", "micro_batch", "accumulation_steps",
             "micro_batches", "base_batch", "learning_rate", "learning_rate_rule", "precision"},
    "Tuning": {"trials", "best", "baseline_samples_per_s", "best_samples_per_s", "study"},
    "Training": {"optimizer_steps", "samples", "samples_per_s", "first_loss", "final_loss", "oom_recoveries",
                 "resumed_from", "checkpoint"},
    "Estimate": {"profile", "budget_bytes", "micro_batch", "micro_batch_low", "micro_batch_high",
                 "peak_allocated_bytes", "peak_reserved_bytes", "seconds", "plan"},
}  # fmt: skip
"""Keys of the JSON that users rely on."""


@pytest.mark.parametrize("name", CONTRACT)
def test_the_keys_that_users_rely_on_exist(name: str) -> None:
    assert CONTRACT[name] <= set(getattr(records, name).__struct_fields__)


def test_a_run_is_the_same_after_a_trip_through_json() -> None:
    run = a_run()
    assert msgspec.json.decode(msgspec.json.encode(run), type=RunRecord) == run
    text = msgspec.json.encode(a_run(training=None)).decode()
    assert '"training":null' in text


def test_records_are_immutable_and_keyword_only() -> None:
    kinds = [one for one in vars(records).values() if isinstance(one, type) and issubclass(one, Record)]
    assert len(kinds) > 15
    assert all(kind.__struct_config__.frozen for kind in kinds)
    with pytest.raises(AttributeError, match="immutable"):
        a_device().kind = "cpu"
    with pytest.raises(TypeError):
        RunRecord(a_device())  # type: ignore[misc]
