"""The bounds of a probe, and what limits its answer."""

from __future__ import annotations

from autobatch.core.options import Options
from autobatch.core.progress import Progress
from autobatch.search.one_probe import Probing, caps_of
from autobatch.search.spill import SpillGuard
from autobatch.setup.child import ThisProcess
from autobatch.setup.setup import describe_setup
from tests.support.step_workloads import WORKLOADS, setup


def test_the_smallest_cap_that_an_answer_reaches_limits_it() -> None:
    made = setup(WORKLOADS["perceptron"]())
    samples = describe_setup(made).samples
    limits = Options().with_values(target_batch=9, max_micro_batch=samples + 1)
    caps = caps_of(describe_setup(made), limits)
    assert caps == {"target_batch": 9, "max_micro_batch": samples + 1, "dataset": samples}
    probing = Probing(ThisProcess(made), limits, caps, SpillGuard(active=False), Progress())
    assert probing.cap == 9
    assert [probing.limited_by(size) for size in (9, 8)] == ["target_batch", "memory"]
