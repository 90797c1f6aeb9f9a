"""A fit checks that the loss can be split before it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import autobatch
from autobatch import InputError
from tests.support.probes import Listener
from tests.support.split_losses import PAIRS
from tests.support.training import contrastive_loss, make_workload

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "memory_budget": "64MiB",
    "target_batch": 24,
    "steps": 2,
    "trials": 0,
}


def test_a_loss_that_cannot_be_split_ends_a_fit_before_it_trains(tmp_path: Path) -> None:
    """The check also runs after a probe that found the micro-batch to fit."""
    options = {**OPTIONS, "max_micro_batch": 8, "out": str(tmp_path / "run")}
    workload = make_workload(loss=contrastive_loss)
    with pytest.raises(InputError, match=r"depends on several samples at once.* use --split-check note"):
        autobatch.fit(workload, **options)
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert autobatch.fit(workload, split_check="note", **options).training.optimizer_steps == 2


def test_a_plan_notes_a_loss_that_cannot_be_split() -> None:
    fields, wrong, right, cause = PAIRS["masked tokens"]
    options: dict[str, Any] = {"device": "cpu", "memory_budget": "64MiB", "max_micro_batch": 16}
    for loss, expected in ((wrong, [cause]), (right, [])):
        notes = Listener()
        autobatch.plan(make_workload(**fields, loss=loss), target_batch=64, progress=notes, **options)
        found = [note for note in notes.notes if "the gradient of" in note or "checked" in note]
        assert len(found) == len(expected)
        assert all(text in note for note, text in zip(found, expected, strict=True))


def ragged_text(length: int = 40) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, length, (160,), generator=draw)
    return [torch.randint(1, 50, (int(one),), generator=draw) for one in lengths]


def padded(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return {"input_ids": ids, "labels": ids.masked_fill(ids == 0, -100)}


def token_mean(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean over the tokens of a batch, as models of other libraries do."""
    return cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def test_a_mean_over_the_tokens_of_ragged_text_is_refused(tmp_path: Path) -> None:
    """The batches of short texts alone are one micro-batch, and those of long ones are not."""
    workload = make_workload(
        model=lambda: torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50)),
        train_data=ragged_text(),
        collate=padded,
        loss=token_mean,
        size_of=len,
    )
    options = {"device": "cpu", "memory_budget": "1MiB", "target_batch": 64, "steps": 2, "trials": 0}
    with pytest.raises(InputError, match=r"[Rr]eturn Loss\(total, count\)") as caught:
        autobatch.fit(workload, out=str(tmp_path / "run"), **options)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "run" / "checkpoints").exists()
