"""Errors that end a run out of memory: their exit codes, and the remedies that apply."""

from __future__ import annotations

import pytest

from autobatch.distributed.engine import OutOfMemory
from autobatch.training.oom_errors import available_host_memory, error_before_step, error_in_step
from tests.support.training import INFO_NCE, make_loop, make_workload

PLAIN = make_loop(make_workload()).train_state
FULL = OutOfMemory("full.", is_fatal=False)
BROKEN = OutOfMemory("broken", is_fatal=True)


@pytest.mark.parametrize(
    ("micro_batch", "oom", "is_intact", "code", "message"),
    [
        (2, BROKEN, True, 77, "in step 3 at a micro-batch of 2, in the driver.*: broken"),
        (2, FULL, False, 77, "micro-batch of 2: full.*a large buffer"),
        (1, FULL, True, 3, "micro-batch of 1: full; what would help: a larger --memory-budget, --precision"),
        (1, BROKEN, False, 3, "micro-batch of 1: broken; what would help"),
    ],
)
def test_a_batch_that_cannot_run_again_ends_the_run(micro_batch, oom, is_intact, code, message) -> None:
    error = error_before_step(PLAIN, 3, oom._replace(size=micro_batch, is_intact=is_intact))
    assert error is not None
    assert error.exit_code == code
    with pytest.raises(type(error), match=message):
        raise error


def test_a_batch_that_is_undone_can_run_again() -> None:
    assert error_before_step(PLAIN, 3, FULL._replace(size=2)) is None


def test_only_remedies_that_apply_are_named() -> None:
    whole = make_loop(make_workload(loss=INFO_NCE), ema=0.9).train_state
    for train_state, expected in ((PLAIN, False), (whole, True)):
        before = str(error_before_step(train_state, 1, FULL._replace(size=1)))
        assert ("a smaller --target-batch" in before) == expected
        assert ("no --ema" in str(error_in_step(train_state, 1, 1, "full."))) == expected


@pytest.mark.parametrize(("micro_batch", "code"), [(4, 77), (2, 77), (1, 3)])
def test_a_failure_inside_the_optimizer_step_is_restarted_smaller_down_to_1(micro_batch, code) -> None:
    error = error_in_step(PLAIN, 5, micro_batch, "full.")
    assert error.exit_code == code
    assert f"step 5 at a micro-batch of {micro_batch}, inside the optimizer step" in str(error)
    assert ("what would help: a larger --memory-budget, a fused optimizer" in str(error)) == (code == 3)


def test_the_available_memory_is_unknown_if_it_cannot_be_read_for_lack_of_memory(monkeypatch) -> None:
    assert available_host_memory().endswith("iB")

    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("autobatch.training.oom_errors.host_memory", fail)
    assert available_host_memory() == "unknown"
