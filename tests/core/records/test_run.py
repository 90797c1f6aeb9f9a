"""The record of a run: the same after a trip through JSON."""

from __future__ import annotations

import msgspec

from autobatch.core.records.run import RunRecord
from tests.support.sample_run import a_run


def test_a_run_is_the_same_after_a_trip_through_json() -> None:
    run = a_run()
    assert msgspec.json.decode(msgspec.json.encode(run), type=RunRecord) == run
    text = msgspec.json.encode(a_run(training=None)).decode()
    assert '"training":null' in text
