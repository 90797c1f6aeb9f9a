"""One child process for all stages of a run, which opens the workload once and answers alike when used."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.support.commandline import autobatch

pytestmark = pytest.mark.program

LOGGED = """
import os
import torch
from torch.utils.data import Dataset
from autobatch import Workload

def note(*words):
    with open(os.environ["EVENTS"], "a") as log:
        print(os.getpid(), *words, file=log)

class Sequences(Dataset):
    def __len__(self):
        return 120
    def __getitem__(self, index):
        return torch.full((1 + index % 5, 4), float(index)), torch.tensor([float(index % 2)])

def pad(samples):
    inputs, labels = zip(*samples)
    return torch.nn.utils.rnn.pad_sequence(list(inputs), batch_first=True) / 120, torch.stack(labels)

def size_of(sample):
    note("size", int(sample[0][0, 0]))
    return len(sample[0])

def model():
    note("model")
    return torch.nn.Linear(4, 1)

def workload():
    note("open")
    return Workload(
        model=model, train_data=Sequences(), collate=pad, size_of=size_of, learning_rate=0.01,
        loss=lambda model, batch: (model(batch[0].sum(dim=1)) - batch[1]).square().mean(),
        optimizer=lambda params, learning_rate: torch.optim.SGD(params, lr=learning_rate),
    )
"""
"""A workload that logs the process of each opening, each model and each size that is read."""


def run_logged(folder: Path, *options: object) -> dict[str, list[tuple[str, ...]]]:
    """Run ``fit``, and return the process and the arguments of each event by its name."""
    (folder / "train.py").write_text(LOGGED)
    log = folder / "events"
    log.write_text("")
    words = ("--target-batch", 16, "--device", "cpu", "--memory-budget", "64MiB", "--out", "run", *options)
    ran = autobatch(folder, "fit", "train.py:workload", *words, EVENTS=str(log))
    assert ran.code == 0, ran.err
    events: dict[str, list[tuple[str, ...]]] = {"open": [], "model": [], "size": []}
    for line in log.read_text().splitlines():
        process, name, *values = line.split()
        events[name].append((process, *values))
    return events


TUNED = ("--trials", 2, "--tune-lr", "--timeout", 3)


def test_a_tuned_run_opens_the_workload_in_two_processes_and_reads_each_size_once(tmp_path: Path) -> None:
    first = run_logged(tmp_path, "--steps", 3, *TUNED)
    processes = [process for (process,) in first["open"]]
    assert len(processes) == len(set(processes)) == 2
    assert sorted(first["model"]) == sorted(first["open"])
    reads = Counter(int(index) for _, index in first["size"])
    assert set(reads) == set(range(120))
    # A few are read again, to see that the sizes do not change.
    assert sum(count - 1 for count in reads.values()) <= 3
    assert len({process for process, _ in first["size"]}) == 1

    again = run_logged(tmp_path, "--steps", 5, *TUNED, "--resume")
    assert (len(again["open"]), len(again["model"])) == (1, 1)
    # The batches are cut by size, so the process that trains reads them.
    assert len(again["size"]) == len(set(again["size"])) == 120
