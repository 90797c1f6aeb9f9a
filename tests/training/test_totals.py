"""Totals of a run, over a resume too."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from autobatch.core.records.training import StepRecord
from autobatch.training.totals import RunTotals
from tests.support.training import make_loop, make_workload


def record(step: int, loss: float | None, *, applied: bool = True) -> StepRecord:
    return StepRecord(
        step=step,
        applied=applied,
        samples=10 * step,
        loss=loss,
        count=10.0,
        learning_rate=0.1,
        grad_norm=1.0,
        micro_batch=5,
        accumulation_steps=2,
        seconds=2.0,
        peak_allocated_bytes=None,
        peak_reserved_bytes=None,
        oom_recoveries=0,
    )


STEPS = [record(1, None, applied=False), record(2, 3.0), record(3, 2.0), record(4, 1.0), record(5, None)]


@pytest.mark.parametrize("resumed_after", range(6))
def test_the_figures_are_those_of_the_whole_run(resumed_after: int) -> None:
    totals = RunTotals()
    for step in STEPS[:resumed_after]:
        totals.add_earlier(msgspec.to_builtins(step))
    for step in STEPS[resumed_after:]:
        totals.add(step)
    assert (totals.first_loss, totals.final_loss, totals.skipped_steps) == (3.0, 1.0, 1)
    assert (totals.samples, totals.seconds) == (50, 10.0)


def test_the_summary_counts_the_loop_and_its_rate() -> None:
    loop = make_loop(make_workload(), target_batch=12, steps=4, ema=0.9)
    totals = RunTotals()
    for step in loop.run():
        totals.add(msgspec.structs.replace(step, seconds=0.5))
    done = totals.summary(
        loop,
        validation={"loss": 1.0},
        checkpoint=Path("new"),
        resumed_from=Path("old"),
        failed_checkpoints=[2],
    )
    assert (done.optimizer_steps, done.samples, done.skipped_steps) == (4, 48, 0)
    assert (done.samples_per_s, done.seconds) == (24.0, 2.0)
    assert (done.checkpoint, done.resumed_from, done.failed_checkpoints) == ("new", "old", [2])
    assert (done.ema, done.micro_batch, done.validation) == (0.9, 5, {"loss": 1.0})
    assert (done.noise_scale, done.noise_advice) == (None, None)
