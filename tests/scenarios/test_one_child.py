"""One child process for all stages of a run, which opens the workload once and answers alike when used."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from autobatch.core.options import Options
from autobatch.core.records import Attempt
from autobatch.planning import make_plan
from autobatch.search.find_limit import find_limit
from autobatch.setup.child import ChildProcess
from autobatch.tuning.learning_rate import LrTrialSpec, ShortRuns
from autobatch.tuning.trial import Trials
from tests.support.commandline import SMALL, autobatch
from tests.support.probes import Listener
from tests.support.trials import changed, task_with

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


TUNED = ("--trials", 2, "--tune-lr", "--lr-trials", 2, "--lr-steps", 4)


@pytest.mark.parametrize("workers", [(), pytest.param(("--workers", 1), marks=pytest.mark.slow)])
def test_a_tuned_run_opens_the_workload_in_two_processes_and_reads_each_size_once(
    tmp_path: Path, workers: tuple[object, ...]
) -> None:
    first = run_logged(tmp_path, "--steps", 3, *TUNED, *workers)
    processes = [process for (process,) in first["open"]]
    assert len(processes) == len(set(processes)) == 2
    assert sorted(first["model"]) == sorted(first["open"])
    reads = Counter(int(index) for _, index in first["size"])
    assert set(reads) == set(range(120))
    # A few are read again, to see that the sizes do not change.
    assert sum(count - 1 for count in reads.values()) <= 3
    assert len({process for process, _ in first["size"]}) == 1

    again = run_logged(tmp_path, "--steps", 5, *TUNED, *workers, "--resume")
    assert (len(again["open"]), len(again["model"])) == (1, 1)
    # The batches are cut by size, so the process that trains reads them.
    assert len(again["size"]) == len(set(again["size"])) == 120


WIDE = """
def workload():
    model = lambda: torch.nn.Sequential(
        torch.nn.Linear(4, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.Linear(256, 1)
    )
    adam = lambda params, learning_rate: torch.optim.AdamW(params, lr=learning_rate)
    return small(model=model, train_data=data(2048), optimizer=adam)
"""


@pytest.mark.usefixtures("warm_children")
@pytest.mark.parametrize(("device", "budget"), [("cpu", "2MiB"), ("sim:t4", "6MiB")])
def test_a_used_child_finds_the_limit_of_a_fresh_one(
    device: str, budget: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "train.py").write_text(SMALL + WIDE)
    settings = Options().with_values(device=device, memory_budget=budget)

    def probe(child: ChildProcess, home: str) -> tuple[int, str | None, list[tuple[object, ...]]]:
        found = find_limit(child, Options(), home=tmp_path / home, progress=Listener()).probe
        assert found.source == "search"
        return found.micro_batch, found.upper_bound_by, [figures(one) for one in found.attempts]

    with ChildProcess(f"{tmp_path}/train.py:workload", settings) as child:
        fresh = probe(child, "fresh")
        task = task_with(limit=fresh[0], cap=2048, samples=64)
        for values in (changed(checkpointing="full"), changed(precision="bf16", optimizer="foreach")):
            assert Trials(child, task).measure(values).feasible
        short = LrTrialSpec(make_plan(target_batch=64, micro_batch_limit=64, learning_rate=0.01), steps=4)
        assert ShortRuns(child, short).run(0.01, seed=0).first is not None
        used = probe(child, "used")
    assert used == fresh
    assert 1 < fresh[0] < 2048


def figures(attempt: Attempt) -> tuple[object, ...]:
    peaks = attempt.peak_allocated_bytes, attempt.peak_reserved_bytes
    return attempt.micro_batch, attempt.fits, attempt.reason, attempt.phase, *peaks
