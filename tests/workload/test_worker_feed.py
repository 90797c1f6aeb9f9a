"""Micro-batches from loader workers: the same samples and draws, and every way that workers end."""

from __future__ import annotations

import multiprocessing.util
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autobatch.cli.failures import describe_failure
from autobatch.core.errors import DoesNotFitError, InputError, UserCodeError
from autobatch.workload import worker_feed
from autobatch.workload.contract import Workload
from autobatch.workload.feed import SeededCollate
from autobatch.workload.loader import open_feed
from autobatch.workload.order import GlobalBatchSampler
from autobatch.workload.rng import capture_random_state, seed_generators
from autobatch.workload.worker_exit import LoaderWorkerCrashed
from autobatch.workload.worker_feed import LoaderWorkerTimeout, WorkerFeed
from tests.support.feeds import augmented, fed_loop, fed_samples
from tests.support.kinds import Augmented
from tests.support.processes import loader_workers
from tests.support.training import Rows, fingerprint, make_loop, make_workload, points


@pytest.mark.parametrize(("workers", "micro_batch"), [(0, 10), (0, 1), (1, 4), (2, 3), (3, 7)])
def test_draws_are_equal_for_any_workers_and_any_micro_batch(workers: int, micro_batch: int) -> None:
    expected = fed_samples(workers=0, micro_batch=4)
    assert len({tuple(inputs) for _, inputs in expected}) == 48  # no draw repeats in two epochs
    assert fed_samples(workers=workers, micro_batch=micro_batch) == expected
    assert fed_samples(workers=workers, micro_batch=micro_batch, start=3) == expected[30:]
    assert fed_samples(workers=0, micro_batch=4, seed=6) != expected


def test_draws_are_those_of_the_seed_written_out_by_hand() -> None:
    (sample, inputs), *_ = fed_samples(workers=2, micro_batch=4)
    seed_generators(5, 0, 0, sample)
    row = points(dtype=torch.float32).columns[0][sample]
    by_hand = row * random.uniform(0.5, 1.5) + float(np.random.normal()) + torch.randn(5)
    assert inputs == by_hand.tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_generators_of_the_run_are_not_touched(workers: int) -> None:
    workload = augmented()
    sampler = GlobalBatchSampler(samples=24, target_batch=10, seed=0, steps=3)
    before = capture_random_state()
    with open_feed(workload, sampler.batches, seed=0, workers=workers, sample_seeds=True) as feed:
        assert feed is not None
        for batch in sampler.batches():
            for _ in feed.collated(batch, 4):
                now = capture_random_state()
                assert now.python == before.python
                assert np.array_equal(now.numpy[1], before.numpy[1])
                assert torch.equal(now.torch, before.torch)


def test_a_collate_function_that_draws_is_seeded_too() -> None:
    def collate(samples):
        inputs, labels = torch.utils.data.default_collate(samples)
        return inputs + torch.randn(()) + random.random(), labels

    prints = set()
    for workers in (0, 1, 2):
        with fed_loop(augmented(collate=collate), workers=workers, sample_seeds=True) as loop:
            list(loop.run())
            prints.add(fingerprint(loop.train_state.model))
    assert len(prints) == 1


def test_data_that_can_fetch_many_samples_is_asked_for_one_at_a_time() -> None:
    class Many(Augmented):
        def __getitems__(self, indices: list[int]):
            assert len(indices) == 1
            return [self[index] for index in indices]

    with fed_loop(augmented(train_data=Many(*points(dtype=torch.float32).columns)), workers=2) as loop:
        assert len(list(loop.run())) == 6


def test_arrays_and_objects_arrive_as_they_were_collated() -> None:
    def collate(samples):
        return {"rows": np.stack([inputs.numpy() for inputs, _ in samples]), "names": ["a"], "n": None}

    workload = augmented(collate=collate)
    sampler = GlobalBatchSampler(samples=24, target_batch=10, seed=0, steps=1)
    found = []
    for workers in (0, 1):
        with open_feed(workload, sampler.batches, seed=0, workers=workers, sample_seeds=True) as feed:
            assert feed is not None
            found.append([data for batch in sampler.batches() for data in feed.collated(batch, 5)])
    for here, there in zip(*found, strict=True):
        assert isinstance(there["rows"], np.ndarray)
        assert np.array_equal(here["rows"], there["rows"])
        assert (there["names"], there["n"]) == (["a"], None)


# more workers than CPUs


def test_more_workers_than_cpus_raise_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user asked for this number; warnings are errors here."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    with pytest.warns(UserWarning, match="This DataLoader will create 2 worker processes"):
        torch.utils.data.DataLoader(points(), num_workers=2)  # torch does warn
    with fed_loop(make_workload(), workers=2, steps=1) as loop:
        assert len(list(loop.run())) == 1


# errors in a worker


class Broken(Rows):
    def __getitem__(self, index: int):
        if index == 3:
            raise ValueError("no such picture")  # HERE
        return super().__getitem__(index)


BROKEN_LINE = next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if "# HERE" in line)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_data_names_its_line(workers: int) -> None:
    workload = make_workload(train_data=Broken(*points().columns))
    with fed_loop(workload, workers=workers, steps=8) as loop, pytest.raises(ValueError) as caught:  # noqa: PT011
        list(loop.run())
    report = describe_failure(caught.value)
    assert report.exit_code == 2
    assert (
        report.line
        == f"the workload's train_data[3] raised ValueError: no such picture ({__file__}:{BROKEN_LINE})"
    )
    if workers:
        assert isinstance(caught.value, UserCodeError)
        assert any("in __getitem__" in note for note in caught.value.__notes__)


def test_errors_of_the_collate_function_are_reported_too() -> None:
    def collate(samples):
        sys.exit("no")

    with fed_loop(make_workload(collate=collate), workers=1) as loop, pytest.raises(InputError) as caught:
        list(loop.run())
    assert "the workload's collate called sys.exit('no')" in str(caught.value)

    class Ragged(Rows):
        def __getitem__(self, index: int):
            return torch.zeros(index + 1), 0

    with (
        fed_loop(make_workload(train_data=Ragged(*points().columns)), workers=1) as loop,
        pytest.raises(InputError, match=r"cannot be collated .* give Workload\(collate=…\)"),
    ):
        list(loop.run())


def test_a_micro_batch_that_cannot_be_sent_is_an_error_and_not_an_endless_wait() -> None:
    def collate(samples):
        return {"rows": torch.stack([inputs for inputs, _ in samples]), "lock": threading.Lock()}

    with (
        fed_loop(make_workload(collate=collate), workers=1) as loop,
        pytest.raises(InputError, match=r"cannot be sent from a loader worker .* --workers 0"),
    ):
        list(loop.run())


def test_out_of_memory_in_a_worker_shrinks_the_micro_batch() -> None:
    def collate(samples):
        if len(samples) > 2:
            raise MemoryError("too many at once")
        return torch.utils.data.default_collate(samples)

    with fed_loop(make_workload(collate=collate), workers=2, micro_batch=7) as loop:
        records = list(loop.run())
    assert [record.micro_batch for record in records] == [2] * 6
    assert "too many at once" not in (records[0].recovered or "")  # torch's heading comes first
    assert "MemoryError" in (records[0].recovered or "")

    def always(samples):
        raise MemoryError

    with (
        fed_loop(make_workload(collate=always), workers=2, micro_batch=1) as loop,
        pytest.raises(DoesNotFitError, match="micro-batch of 1"),
    ):
        list(loop.run())


# ends of workers


class Deadly(Rows):
    """Data that kills its worker at one sample, as the kernel does when memory runs out."""

    home = os.getpid()

    def __getitem__(self, index: int):
        if index == 3 and os.getpid() != self.home:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_killed_worker_is_reported_and_the_others_end() -> None:
    with fed_loop(make_workload(train_data=Deadly(*points().columns)), workers=2, steps=8) as loop:
        with pytest.raises(
            LoaderWorkerCrashed, match=r"worker \d+ ended with signal SIGKILL: .* fewer --workers"
        ):
            list(loop.run())
        assert isinstance(loop.feed, WorkerFeed)
    assert not loader_workers()


def test_a_worker_killed_between_waits_is_reported_at_the_next_micro_batch() -> None:
    before = signal.getsignal(signal.SIGCHLD)
    with fed_loop(make_workload(), workers=2, steps=50) as loop:
        run = loop.run()
        next(run)
        victim = loader_workers()[0]
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        time.sleep(0.05)  # nothing is raised here
        with pytest.raises(LoaderWorkerCrashed, match=str(victim.pid)):
            list(run)
    assert not loader_workers()
    assert signal.getsignal(signal.SIGCHLD) is before


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_killed_worker_leaves_no_folder_of_its_own() -> None:
    # A short path, because that of a socket has a hundred characters at most.
    with tempfile.TemporaryDirectory() as name:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                feed_and_kill(name)
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def feed_and_kill(folder: str) -> None:
    tempfile.tempdir = folder
    multiprocessing.current_process()._config.pop("tempdir", None)
    sampler = GlobalBatchSampler(samples=24, target_batch=7, seed=0, steps=50)
    with open_feed(make_workload(), sampler.batches, seed=0, workers=2) as feed:
        next(feed.collated(next(sampler.batches(0)), 5))
        for worker in feed._stream._workers:
            os.kill(worker.pid, signal.SIGKILL)
            worker.join()
    assert list(Path(folder).iterdir()) == [Path(multiprocessing.util.get_temp_dir())]


class Hanging(Rows):
    """Data whose worker waits forever at one sample, as on a lock that nobody releases."""

    home = os.getpid()

    def __getitem__(self, index: int):
        if index == 3 and os.getpid() != self.home:
            threading.Event().wait()
        return super().__getitem__(index)


def feed_of(workload: Workload, sampler: GlobalBatchSampler, **options: Any) -> WorkerFeed:
    collate = SeededCollate(data=workload.train_data, collate=None, seed=0)
    return WorkerFeed(collate, sampler.batches, **{"workers": 2, "prefetch": 2, **options})


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_hangs_is_named_after_the_time_limit(monkeypatch, workers: int) -> None:
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    monkeypatch.setattr(worker_feed, "POLL_S", 0.2)
    loop = make_loop(
        make_workload(train_data=Hanging(*points().columns)), target_batch=7, micro_batch=3, steps=8
    )
    loop.feed = feed_of(loop.workload, loop.sampler, workers=workers, time_limit_s=1.0)
    try:
        with pytest.raises(
            LoaderWorkerTimeout, match=r"worker \d+ \(number .* within the limit of 1 s.*--workers 0"
        ) as caught:
            list(loop.run())
        pids = [process.pid for process in loader_workers()]
        assert any(f"loader worker {pid} " in str(caught.value) for pid in pids)
    finally:
        loop.feed.close()
    assert not loader_workers()


def test_a_slow_worker_is_waited_for_over_many_polls(monkeypatch) -> None:
    """The order of the samples survives the polls that found nothing, and the limit is per micro-batch."""
    monkeypatch.setattr(worker_feed, "POLL_S", 0.02)
    workload = make_workload(train_data=Slow(*points().columns))
    sampler = GlobalBatchSampler(samples=24, target_batch=8, seed=0, steps=3)
    feed = feed_of(workload, sampler, time_limit_s=60.0)
    try:
        found = [labels for batch in sampler.batches() for _, labels in feed.collated(batch, 4)]
    finally:
        feed.close()
    ids = [one for batch in sampler.batches() for one in batch.ids]
    assert torch.equal(torch.cat(found), points().columns[1][ids])


def test_the_default_limit_is_generous() -> None:
    workload = make_workload()
    feed = feed_of(workload, GlobalBatchSampler(samples=24, target_batch=8, seed=0, steps=1))
    assert feed._time_limit_s >= 600


class Slow(Rows):
    def __getitem__(self, index: int):
        time.sleep(0.05)
        return super().__getitem__(index)


def test_workers_end_when_the_loop_is_left_early() -> None:
    with fed_loop(make_workload(train_data=Slow(*points().columns)), workers=2, micro_batch=7) as loop:
        next(loop.run())
        assert len(loader_workers()) == 2
    assert not loader_workers()


def test_off_the_main_thread_no_signal_handler_is_set() -> None:
    before = signal.getsignal(signal.SIGCHLD)
    done = []

    def work() -> None:
        with fed_loop(augmented(), workers=1) as loop:
            done.append(len(list(loop.run())))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [6]
    assert signal.getsignal(signal.SIGCHLD) is before


@pytest.mark.gpu
def test_micro_batches_for_a_gpu_are_in_pinned_memory() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    workload = augmented()
    sampler = GlobalBatchSampler(samples=24, target_batch=10, seed=0, steps=3)
    gpu = torch.device("cuda", torch.cuda.device_count() - 1)
    found = []
    for workers in (0, 2):
        with open_feed(
            workload, sampler.batches, seed=0, workers=workers, sample_seeds=True, gpu=gpu
        ) as feed:
            assert feed is not None
            found.append([data for batch in sampler.batches() for data in feed.collated(batch, 4)])
    assert all(tensor.is_pinned() for data in found[1] for tensor in data)
    for here, there in zip(*found, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(here, there, strict=True))
    assert not loader_workers()
