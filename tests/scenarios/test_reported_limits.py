"""Limits that users have reported: a size that does not run, and what is said of one that does."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import autobatch
from autobatch import DoesNotFitError, Loss
from tests.support.commandline import SMALL
from tests.support.probes import Listener, pad, sequences, work
from tests.support.rank_server import RankServer
from tests.support.training import mean_loss

WIDTH = 8


class WithHoles(Dataset):
    """Sequences, some of which cannot be read and are None."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor] | None:
        if index in (13, 29, 31, 45, 46, 55, 57):
            return None
        return torch.ones(1 + index % 16, WIDTH), torch.tensor(index % 4)


def masked_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    inputs, labels = batch
    mask = inputs.ne(0).any(-1, keepdim=True)
    means = (model(inputs) * mask).sum(1) / mask.sum(1)
    return Loss(cross_entropy(means, labels, reduction="sum"), len(labels))


@pytest.mark.parametrize("limit", [None, 8])
def test_samples_that_cannot_be_split_by_size_are_split_by_count(limit: int | None) -> None:
    """A batch of None alone cannot be collated, and no run has one: any 8 samples in a row have others."""
    workload = work(
        lambda: nn.Linear(WIDTH, 4),
        train_data=WithHoles(),
        collate=lambda samples: pad([sample for sample in samples if sample is not None]),
        size_of=lambda sample: 0 if sample is None else len(sample[0]),
        loss=masked_loss,
    )
    listener = Listener()
    options = {"target_batch": 32, "device": "cpu", "memory_budget": "64MiB", "max_micro_batch": limit}
    plan = autobatch.plan(workload, progress=listener, **options)
    assert (plan.split, sum(plan.micro_batches), plan.micro_batch) == ("count", 32, limit or 32)
    assert [note for note in listener.notes if "split by count" in note]


def test_a_size_that_did_not_run_is_no_answer() -> None:
    """Batches of many lengths fragment the memory, and then also fewer of the longest samples fail.

    The oracle is the loss, which knows every size that has failed.
    """
    failed: set[int] = set()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        count, is_mixed = len(labels), bool((inputs[:, -1] == 0).any())
        largest = 10 if is_mixed else 7 if failed & {11, 12} else 12
        if count > largest:
            failed.add(count)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return cross_entropy(model(inputs).sum(1), labels)

    lengths = [16 if index % 4 == 0 else 1 + index % 5 for index in range(96)]
    workload = work(
        lambda: nn.Linear(WIDTH, 4, bias=False), train_data=sequences(lengths), collate=pad, loss=loss
    )
    options = {"target_batch": 24, "device": "sim:t4", "memory_budget": "64MiB"}
    plan = autobatch.plan(workload, split="count", split_check="off", **options)
    assert failed & {11, 12}, "no batch of the run was tried at the limit of the longest samples"
    assert not failed & {plan.probe.micro_batch, *plan.micro_batches}
    assert sum(plan.micro_batches) == 24


@pytest.mark.parametrize("is_shown", [True, False])
def test_a_folder_where_nothing_was_probed_has_no_saved_limit(
    tmp_path: Path, is_shown: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two projects may have a file of the same name."""
    caplog.set_level(logging.INFO, "autobatch")
    listener = Listener()
    mine = SMALL.replace('"name": "small",', "")
    theirs = mine.replace("Linear(4, 1)", "Linear(4, 1, bias=False)")
    for folder, source in ((tmp_path / "mine", mine), (tmp_path / "theirs", theirs)):
        folder.mkdir()
        (folder / "train.py").write_text(source)
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(folder)
        monkeypatch.delitem(sys.modules, "train", raising=False)
        caplog.clear()
        autobatch.probe(
            "train.py", device="cpu", memory_budget="64MiB", progress=listener if is_shown else False
        )
    assert not [line for line in (*listener.notes, *caplog.messages) if "saved on" in line]


def probe_of_rank(budgets: tuple[str, str]) -> tuple[int, str]:
    """Return the limit of this rank and what is said of it."""
    torch.set_num_threads(1)
    found = autobatch.probe(work(), device="cpu", memory_budget=budgets[int(os.environ["RANK"])])
    return found.micro_batch, str(found)


@pytest.mark.distributed
def test_ranks_whose_limits_differ_all_tell_the_least(server: RankServer, own_home: Path) -> None:
    def probe(*budgets: str) -> list[tuple[int, str]]:
        environ = {"AUTOBATCH_HOME": str(own_home / "-".join(budgets))}
        return server.values(probe_of_rank, budgets, environ=environ, seconds=60.0)

    (expected, _), _ = probe("40KiB", "40KiB")
    for limit, said in probe("80KiB", "40KiB"):
        assert limit == expected
        assert f" {limit} samples" in said
        assert "on others" not in said
        assert "None" not in said


def thread_failing_above(samples: int) -> autobatch.Workload:
    """Return a workload that meets a limit on the threads of a user (``ulimit -u``), whatever the budget."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if len(batch[1]) > samples:
            raise RuntimeError("can't start new thread")
        return mean_loss(model, batch)

    return work(loss=loss)


def test_a_thread_that_cannot_start_is_told_as_itself_and_is_no_want_of_memory() -> None:
    with pytest.raises(RuntimeError, match="thread") as caught:
        autobatch.probe(thread_failing_above(0), device="cpu", memory_budget="1MiB")
    assert not isinstance(caught.value, DoesNotFitError)
    found = autobatch.probe(thread_failing_above(3), device="cpu", memory_budget="1MiB", max_micro_batch=4)
    assert (found.micro_batch, found.oom_count) == (3, 0)
