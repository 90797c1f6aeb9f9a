"""Feeds of a loop: the same samples and draws in this process and from workers, and every way workers end."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import threading
import time
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from autobatch import InputError
from autobatch.workload.feed import Feed, outside_locks
from autobatch.workload.order import GlobalBatchSampler, Split
from autobatch.workload.rng import capture_random_state
from tests.support.feeds import fed_loop, loader_workers
from tests.support.kinds import stateful
from tests.support.training import (
    INFO_NCE,
    Augmented,
    Rows,
    fingerprint,
    make_workload,
    mean_loss,
    network,
    points,
)

SAMPLER = GlobalBatchSampler(samples=24, target_batch=10, seed=0, steps=3)


class Numbered(Augmented):
    """Augmented samples that begin with their index."""

    def __getitem__(self, index: int):
        return index, *super().__getitem__(index)


def fed_samples(
    workers: int, micro_batch: int, start: int = 0, seed: int = 5
) -> list[tuple[int, list[float]]]:
    """Return every sample of a run of two epochs in order: its index, and its augmented inputs."""
    workload = make_workload(train_data=Numbered(*points(dtype=torch.float32).columns))
    sampler = GlobalBatchSampler(samples=24, target_batch=10, seed=seed, epochs=2)
    found = []
    with closing(Feed(workload, sampler, Split(), workers=workers, seeds_samples=True)) as feed:
        for batch in sampler.batches(start):
            for ids, inputs, _ in feed.collated(Split().parts(batch, micro_batch), micro_batch):
                found += list(zip(ids.tolist(), inputs.tolist(), strict=True))
    return found


def test_draws_are_equal_for_any_workers_and_any_micro_batch() -> None:
    expected = fed_samples(workers=0, micro_batch=4)
    assert len({tuple(inputs) for _, inputs in expected}) == 48  # no draw repeats in two epochs
    assert fed_samples(workers=0, micro_batch=4, seed=6) != expected
    for workers, micro_batch in ((0, 1), (1, 4), (3, 7)):
        assert fed_samples(workers=workers, micro_batch=micro_batch) == expected
        assert fed_samples(workers=workers, micro_batch=micro_batch, start=3) == expected[30:]


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_arrive_as_they_were_collated_and_are_read_one_at_a_time(workers: int) -> None:
    """The generators of the run are not touched."""

    class Many(Augmented):
        def __getitems__(self, indices: list[int]):
            assert len(indices) == 1
            return [self[index] for index in indices]

    def collate(samples):
        return {"rows": np.stack([inputs.numpy() for inputs, _ in samples]), "names": ["a"], "n": None}

    workload = stateful(train_data=Many(*points(dtype=torch.float32).columns), collate=collate)
    before = repr(capture_random_state())
    with closing(Feed(workload, SAMPLER, Split(), workers=workers, seeds_samples=True)) as feed:
        for batch in SAMPLER.batches():
            for data in feed.collated(Split().parts(batch, 5), 5):
                assert isinstance(data["rows"], np.ndarray)
                assert (data["rows"].shape, data["names"], data["n"]) == ((5, 5), ["a"], None)
                assert repr(capture_random_state()) == before


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"collate": lambda samples: sys.exit("no")}, r"the workload's collate called sys.exit\('no'\)"),
        (
            {"train_data": [torch.zeros(n) for n in range(24)]},
            r"cannot be collated .* give Workload\(collate=…\)",
        ),
    ],
)
def test_errors_of_the_collate_function_are_those_of_the_user(fields: dict[str, Any], message: str) -> None:
    workload = make_workload(**fields)
    with fed_loop(workload, workers=1) as loop, pytest.raises(InputError, match=message):
        list(loop.run())


@pytest.mark.parametrize("loss", [mean_loss, INFO_NCE])
def test_out_of_memory_in_a_worker_shrinks_the_micro_batch_and_repeats_its_draws(loss: Any) -> None:
    def collate(samples):
        """Draw beside the samples, seeded by the first of a micro-batch."""
        if len(samples) > 2:
            raise MemoryError("too many at once")
        inputs, labels = torch.utils.data.default_collate(samples)
        return inputs + torch.randn(()) + random.random(), labels

    workload = stateful(model=lambda: network(torch.float32), collate=collate, loss=loss)
    with fed_loop(workload, workers=2, micro_batch=7) as loop:
        records = list(loop.run())
        found = fingerprint(loop.train_state.model)
    assert [record.micro_batch for record in records] == [2] * 6
    assert "MemoryError" in (records[0].recovered or "")
    with fed_loop(workload, workers=0, sample_seeds=True, micro_batch=2) as loop:
        list(loop.run())
        assert fingerprint(loop.train_state.model) == found


def test_a_micro_batch_that_cannot_be_sent_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's queue drops it."""
    monkeypatch.setattr("autobatch.workload.feed.PATIENCE", 2)
    workload = make_workload(collate=lambda samples: {"lock": threading.Lock()})
    with (
        pytest.raises(RuntimeError, match="timed out after 2 seconds"),
        fed_loop(workload, workers=1) as loop,
    ):
        list(loop.run())


def test_a_slow_worker_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autobatch.workload.feed.CHECK_S", 0.1)
    workload = make_workload(
        collate=lambda samples: time.sleep(0.3) or torch.utils.data.default_collate(samples)
    )
    with fed_loop(workload, workers=1, steps=2) as loop:
        assert len(list(loop.run())) == 2


# Ends of workers.


class Deadly(Rows):
    """Data that end their worker at its first sample, before it sent anything that the loop would miss."""

    home, number = os.getpid(), 0

    def __getitem__(self, index: int):
        if os.getpid() != self.home:
            faulthandler.disable()  # pytest's would print
            os.kill(os.getpid(), self.number)
        return super().__getitem__(index)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGBUS])
def test_a_worker_that_ended_is_reported_and_the_others_end(number: int) -> None:
    data = Deadly(*points().columns)
    data.number = number
    workload = make_workload(train_data=data)
    with (
        pytest.raises(RuntimeError, match=r"DataLoader worker \(pid.* \d+\) (is killed|exited)"),
        fed_loop(workload, workers=2, steps=8) as loop,
    ):
        list(loop.run())
    assert not loader_workers()


def test_the_end_of_a_worker_leaves_no_lock_taken() -> None:
    """A signal arrives just after the lock of a queue was taken, before the block that gives it back."""

    def report(number: int, frame: Any) -> None:
        raise RuntimeError("a worker has failed")

    given_back = []
    lock = SimpleNamespace(
        __enter__=partial(signal.raise_signal, signal.SIGCHLD),
        __exit__=lambda *_: given_back.append(True),
        acquire=None,
        release=None,
    )
    before = signal.signal(signal.SIGCHLD, partial(outside_locks, report))
    try:
        with pytest.raises(RuntimeError, match="has failed"), threading.Condition(cast("Any", lock)):
            time.sleep(60)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert given_back


@pytest.mark.gpu
def test_micro_batches_for_a_gpu_are_in_pinned_memory() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    gpu = torch.device("cuda", torch.cuda.device_count() - 1)
    found = []
    for workers in (0, 2):
        feed = Feed(stateful(), SAMPLER, Split(), workers=workers, seeds_samples=True, device=gpu)
        with closing(feed):
            found.append(
                [data for batch in SAMPLER.batches() for data in feed.collated(Split().parts(batch, 4), 4)]
            )
    assert all(tensor.is_pinned() for data in found[1] for tensor in data)
    assert all(
        torch.equal(*pair)
        for here, there in zip(*found, strict=True)
        for pair in zip(here, there, strict=True)
    )
    assert not loader_workers()
