"""The check of a loss before a fit and within a plan, from the outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import autobatch
from autobatch import InputError
from tests.support.probes import Listener
from tests.support.ragged import ragged_workload
from tests.support.split_losses import PAIRS
from tests.support.training import contrastive_loss, make_workload, whole_tokens

OPTIONS: dict[str, Any] = {"device": "cpu", "memory_budget": "64MiB", "max_micro_batch": 8}
RUN: dict[str, Any] = {**OPTIONS, "target_batch": 24, "steps": 2, "trials": 0}


@pytest.mark.parametrize(
    ("workload", "cause"),
    [
        (make_workload(loss=contrastive_loss), "depends on several samples at once"),
        # Batches of short texts alone are one micro-batch, and those of long ones are not.
        (ragged_workload(loss=whole_tokens), r"[Rr]eturn Loss\(total, count\)"),
    ],
)
def test_a_loss_that_cannot_be_split_ends_a_fit_before_it_trains(
    workload: autobatch.Workload, cause: str, tmp_path: Path
) -> None:
    """The check also runs after a probe that found the micro-batch to fit."""
    with pytest.raises(InputError, match=f"{cause}.* use --split-check note"):
        autobatch.fit(workload, **RUN, out=tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()
    noted = autobatch.fit(workload, **RUN, split_check="note", out=tmp_path / "run")
    assert noted.training.optimizer_steps == 2


def test_a_plan_notes_a_loss_that_cannot_be_split() -> None:
    fields, wrong, right = PAIRS["masked tokens"]
    for loss, expected in ((wrong, ["likely causes"]), (right, [])):
        notes = Listener()
        autobatch.plan(make_workload(**fields, loss=loss), target_batch=64, progress=notes, **OPTIONS)
        found = [note for note in notes.notes if "the gradient of" in note or "checked" in note]
        assert len(found) == len(expected)
        assert all(text in note for note, text in zip(found, expected, strict=True))
