"""What holds for every recording: a label for each block, of a known kind, and blocks in their order."""

from __future__ import annotations

import pytest

from autobatch.device.allocator.trace import FREE
from autobatch.footprint.tracing.trace_step import record
from autobatch.setup.attempt import ATTEMPT_STEPS
from tests.support.step_workloads import WORKLOADS, setting, setup


@pytest.mark.parametrize("name", ["perceptron", "transformer"])
def test_each_block_of_a_step_has_a_label_of_a_known_kind(name: str) -> None:
    found = record(setting(setup(WORKLOADS[name]()), steps=ATTEMPT_STEPS), 2)
    blocks = [block for block, size in found.trace.events if size != FREE]
    assert blocks == list(range(len(found.labels)))
    assert found.trace.canonical() == found.trace
    assert {label.kind for label in found.labels} >= {"parameters", "batch", "activations", "gradients"}
    assert all(found.trace.events[one.at - 1][1] != FREE for one in found.products)
