"""Micro-batches from loader workers: the same samples, the same draws, and the same ends."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autobatch import fit
from autobatch.cli.failures import describe_failure
from autobatch.core.errors import DoesNotFitError, InputError, UserCodeError
from autobatch.core.progress import Progress
from autobatch.core.signals import stop_on_signals
from autobatch.device.allocator.ledger import MemoryStats
from autobatch.training.checkpoint import load_newest
from autobatch.training.loop_state import restore_loop
from autobatch.training.run import RunSettings, train
from autobatch.workload.feed import SeededCollate, SeededFeed
from autobatch.workload.loader import LoaderWorkerCrashed, WorkerFeed, open_feed, why_not_sent
from autobatch.workload.order import GlobalBatch, GlobalBatchSampler
from autobatch.workload.rng import capture_random_state, seed_generators
from tests.support.commandline import SMALL, autobatch, command, environment
from tests.support.faults import Fault, Quick, Watching
from tests.support.kinds import RUNS, Augmented, Everything, adamw
from tests.support.training import Rows, fingerprint, make_loop, make_workload, network, points

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def augmented(**changes: Any):
    data = Augmented(*points(dtype=torch.float32).columns)
    return make_workload(**{"model": Everything, "train_data": data, "optimizer": adamw, **changes})


class Recorded(Augmented):
    """Also gives the number of the sample."""

    def __getitem__(self, index: int):
        inputs, labels = super().__getitem__(index)
        return index, inputs, labels


@contextmanager
def looping(workload, *, workers: int, sample_seeds: bool = False, seed: int = 0, **options: Any):
    """A loop that is fed, as ``fit`` opens it."""
    loop = make_loop(workload, seed=seed, **{"target_batch": 7, "micro_batch": 3, "steps": 6, **options})
    with open_feed(
        workload, loop.sampler.batches, seed=seed, workers=workers, sample_seeds=sample_seeds
    ) as feed:
        loop.feed = feed
        yield loop


def drawn(*, workers: int, micro_batch: int, start: int = 0, seed: int = 5) -> list[tuple[int, list[float]]]:
    """Every sample of a run in order, with what its data set drew."""
    workload = make_workload(train_data=Recorded(*points(dtype=torch.float32).columns))
    sampler = GlobalBatchSampler(samples=24, target_batch=10, seed=seed, epochs=2)
    found = []
    with open_feed(workload, sampler.batches, seed=seed, workers=workers, sample_seeds=True) as feed:
        assert feed is not None
        for window in sampler.batches(start):
            for ids, inputs, _ in feed.collated(window, micro_batch):
                found += list(zip(ids.tolist(), inputs.tolist(), strict=True))
    return found


def ended(processes: list[Any], seconds: float = 10.0) -> bool:
    """Whether processes, by their ids, are gone (a zombie is) before the time is over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if all(state_of(pid) in (None, "Z") for pid in processes):
            return True
        time.sleep(0.02)
    return False


def state_of(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def children_of(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and command_of(path.parent) == command_of(Path(f"/proc/{pid}")):
            found.append(int(path.parent.name))
    return found


def command_of(process: Path) -> bytes:
    """A fork's is that of the process that it is a copy of."""
    return (process / "cmdline").read_bytes()


@pytest.mark.parametrize(("workers", "micro_batch"), [(0, 10), (0, 1), (1, 4), (2, 3), (3, 7)])
def test_samples_are_drawn_alike_for_any_workers_and_any_micro_batch(workers: int, micro_batch: int) -> None:
    expected = drawn(workers=0, micro_batch=4)
    assert len({tuple(inputs) for _, inputs in expected}) == 48  # each draw is its own, over both epochs
    assert drawn(workers=workers, micro_batch=micro_batch) == expected
    assert drawn(workers=workers, micro_batch=micro_batch, start=3) == expected[30:]
    assert drawn(workers=0, micro_batch=4, seed=6) != expected


def test_draws_are_those_of_an_oracle_by_hand() -> None:
    (sample, inputs), *_ = drawn(workers=2, micro_batch=4)
    seed_generators(5, 0, 0, sample)
    row = points(dtype=torch.float32).columns[0][sample]
    by_hand = row * random.uniform(0.5, 1.5) + float(np.random.normal()) + torch.randn(5)
    assert inputs == by_hand.tolist()


def test_seeds_of_neighbours_have_nothing_in_common() -> None:
    draws = []
    for key in [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 0, -1)]:
        seed_generators(*key)
        draws.append((random.random(), np.random.random(), float(torch.rand(()))))
    assert all(len(set(column)) == len(draws) for column in zip(*draws, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_generators_of_the_run_do_not_notice(workers: int) -> None:
    workload = augmented()
    sampler = GlobalBatchSampler(samples=24, target_batch=10, seed=0, steps=3)
    before = capture_random_state()
    with open_feed(workload, sampler.batches, seed=0, workers=workers, sample_seeds=True) as feed:
        assert feed is not None
        for window in sampler.batches():
            for _ in feed.collated(window, 4):
                now = capture_random_state()
                assert now.python == before.python
                assert np.array_equal(now.numpy[1], before.numpy[1])
                assert torch.equal(now.torch, before.torch)


def test_without_either_option_nothing_stands_between_the_loop_and_its_data() -> None:
    workload = augmented()
    with open_feed(workload, lambda _: iter(()), seed=0) as feed:
        assert feed is None


@pytest.mark.parametrize("kind", ["augmented, averaged", "ragged", "overflowing", "whole batch"])
def test_a_run_trains_the_same_with_and_without_workers(kind: str) -> None:
    workload, options = RUNS[kind]()
    prints = set()
    for workers in (0, 2):
        with looping(workload, workers=workers, sample_seeds=True, **options) as loop:
            records = list(loop.run())
            assert [record.micro_batch for record in records] == [3] * 6
            prints.add(fingerprint(loop.train_state.model))
    assert len(prints) == 1


def test_a_collate_that_draws_is_seeded_too() -> None:
    def collate(samples):
        inputs, labels = torch.utils.data.default_collate(samples)
        return inputs + torch.randn(()) + random.random(), labels

    prints = set()
    for workers in (0, 1, 2):
        with looping(augmented(collate=collate), workers=workers, sample_seeds=True) as loop:
            list(loop.run())
            prints.add(fingerprint(loop.train_state.model))
    assert len(prints) == 1


def test_data_that_fetch_many_are_asked_for_one_at_a_time() -> None:
    class Many(Augmented):
        def __getitems__(self, indices: list[int]):
            assert len(indices) == 1
            return [self[index] for index in indices]

    with looping(augmented(train_data=Many(*points(dtype=torch.float32).columns)), workers=2) as loop:
        assert len(list(loop.run())) == 6


def test_arrays_and_objects_come_as_the_collate_made_them() -> None:
    def collate(samples):
        return {"rows": np.stack([inputs.numpy() for inputs, _ in samples]), "names": ["a"], "n": None}

    workload = augmented(collate=collate)
    sampler = GlobalBatchSampler(samples=24, target_batch=10, seed=0, steps=1)
    batches = []
    for workers in (0, 1):
        with open_feed(workload, sampler.batches, seed=0, workers=workers, sample_seeds=True) as feed:
            assert feed is not None
            batches.append([batch for window in sampler.batches() for batch in feed.collated(window, 5)])
    for here, there in zip(*batches, strict=True):
        assert isinstance(there["rows"], np.ndarray)
        assert np.array_equal(here["rows"], there["rows"])
        assert (there["names"], there["n"]) == (["a"], None)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_replay_in_smaller_micro_batches_sees_the_same_samples(workers: int) -> None:
    """Without batch statistics and dropout, the split changes nothing but rounding."""
    workload = make_workload(
        train_data=Augmented(*(c.double() if c.is_floating_point() else c for c in points().columns))
    )
    with looping(workload, workers=0, sample_seeds=True, micro_batch=7) as straight:
        losses = [record.loss for record in straight.run()]
    fault = Fault()
    options = {"meter": Watching(fault), "device": Quick(memory_budget="1GiB")}
    with looping(workload, workers=workers, sample_seeds=True, micro_batch=7, **options) as loop, fault:
        run = loop.run()
        records = [next(run), next(run)]
        fault.armed, fault.count, fault.at = True, 0, {30}
        records.append(next(run))
        fault.armed = False
        records += run
    assert [record.micro_batch for record in records] == [7, 7, 4, 4, 4, 4]
    assert loop.oom_recoveries == 1
    assert [record.loss for record in records] == pytest.approx(losses, rel=1e-12)


class Meter(Watching):
    """A card that holds two samples less than it was asked to."""

    def count(self, tensors) -> None:
        tensors = list(tensors)
        if len(tensors[0]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    def stats(self) -> MemoryStats:
        return MemoryStats(None, None, None, None, None)


def test_the_stream_begins_anew_as_often_as_memory_runs_out() -> None:
    workload = augmented(model=lambda: network(torch.float32))
    with looping(workload, workers=2, micro_batch=7, meter=Meter(None)) as loop:
        records = list(loop.run())
        smaller = fingerprint(loop.train_state.model)
    assert [record.micro_batch for record in records] == [2] * 6
    assert loop.oom_recoveries == 2
    with looping(workload, workers=0, sample_seeds=True, micro_batch=2) as loop:
        list(loop.run())
        assert fingerprint(loop.train_state.model) == smaller


@pytest.mark.parametrize(("first", "then"), [(0, 2), (2, 0), (2, 3)])
def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path: Path, first: int, then: int) -> None:
    """Stopped at a checkpoint that was not the newest when it ended, and gone on with other workers."""
    with looping(augmented(), workers=0, sample_seeds=True) as loop:
        list(loop.run())
        expected = fingerprint(loop.train_state.model)
    settings = RunSettings(out=tmp_path, checkpoint_every=2, keep_last=3, facts={}, resume_hint="")

    class Stop(Progress):
        def stepped(self, step, of) -> None:
            if step.step == 5:
                raise KeyError

    with looping(augmented(), workers=first, sample_seeds=True) as loop, pytest.raises(KeyError):
        train(loop, settings, Stop(), None)
    resumed = load_newest(tmp_path / "checkpoints")
    assert resumed.state["counters"]["batches_seen"] == 4
    with looping(augmented(), workers=then, sample_seeds=True) as loop:
        restore_loop(loop, resumed.state, same_hardware=True)
        train(loop, settings, Progress(), resumed)
        assert fingerprint(loop.train_state.model) == expected


class Broken(Rows):
    def __getitem__(self, index: int):
        if index == 3:
            raise ValueError("no such picture")  # HERE
        return super().__getitem__(index)


BROKEN_LINE = next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if "# HERE" in line)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_data_is_told_with_its_place(workers: int) -> None:
    workload = make_workload(train_data=Broken(*points().columns))
    with looping(workload, workers=workers, steps=8) as loop, pytest.raises(ValueError) as caught:  # noqa: PT011
        list(loop.run())
    complaint = describe_failure(caught.value)
    assert complaint.exit_code == 2
    assert complaint.line == (
        f"the workload's data raised ValueError: no such picture ({__file__}:{BROKEN_LINE})"
    )
    if workers:
        assert isinstance(caught.value, UserCodeError)
        assert any("in __getitem__" in note for note in caught.value.__notes__)


def test_an_error_of_the_collate_and_samples_that_cannot_be_joined_are_told_too() -> None:
    def collate(samples):
        sys.exit("no")

    with looping(make_workload(collate=collate), workers=1) as loop, pytest.raises(InputError) as caught:
        list(loop.run())
    assert "the workload's collate called sys.exit('no')" in str(caught.value)

    class Ragged(Rows):
        def __getitem__(self, index: int):
            return torch.zeros(index + 1), 0

    with (
        looping(make_workload(train_data=Ragged(*points().columns)), workers=1) as loop,
        pytest.raises(InputError, match=r"cannot be joined to a batch .* give Workload\(collate=…\)"),
    ):
        list(loop.run())


def test_a_batch_that_cannot_be_sent_is_an_error_and_no_wait() -> None:
    def collate(samples):
        return {"rows": torch.stack([inputs for inputs, _ in samples]), "lock": threading.Lock()}

    with (
        looping(make_workload(collate=collate), workers=1) as loop,
        pytest.raises(InputError, match=r"cannot be sent from a loader worker .* --workers 0"),
    ):
        list(loop.run())


def test_memory_that_runs_out_in_a_worker_shrinks_the_micro_batch() -> None:
    def collate(samples):
        if len(samples) > 2:
            raise MemoryError("too many at once")
        return torch.utils.data.default_collate(samples)

    with looping(make_workload(collate=collate), workers=2, micro_batch=7) as loop:
        records = list(loop.run())
    assert [record.micro_batch for record in records] == [2] * 6
    assert "too many at once" not in (records[0].recovered or "")  # torch's heading comes first
    assert "MemoryError" in (records[0].recovered or "")

    def always(samples):
        raise MemoryError

    with (
        looping(make_workload(collate=always), workers=2, micro_batch=1) as loop,
        pytest.raises(DoesNotFitError, match="micro-batch of 1"),
    ):
        list(loop.run())


class Deadly(Rows):
    """Its process is killed at a sample, as the kernel does where memory runs out."""

    home = os.getpid()

    def __getitem__(self, index: int):
        if index == 3 and os.getpid() != self.home:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_worker_that_is_killed_is_told_and_the_others_end() -> None:
    with looping(make_workload(train_data=Deadly(*points().columns)), workers=2, steps=8) as loop:
        with pytest.raises(
            LoaderWorkerCrashed, match=r"worker \d+ ended \(signal SIGKILL\): .* fewer --workers"
        ):
            list(loop.run())
        assert isinstance(loop.feed, WorkerFeed)
    assert not multiprocessing.active_children()


def test_a_worker_that_is_killed_while_nobody_waits_is_told_at_the_next_micro_batch() -> None:
    before = signal.getsignal(signal.SIGCHLD)
    with looping(make_workload(), workers=2, steps=50) as loop:
        run = loop.run()
        next(run)
        victim = multiprocessing.active_children()[0]
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        time.sleep(0.05)  # nothing is raised here
        with pytest.raises(LoaderWorkerCrashed, match=str(victim.pid)):
            list(run)
    assert not multiprocessing.active_children()
    assert signal.getsignal(signal.SIGCHLD) is before


class Slow(Rows):
    def __getitem__(self, index: int):
        time.sleep(0.05)
        return super().__getitem__(index)


def test_workers_are_gone_when_the_loop_is_left_in_the_middle() -> None:
    with looping(make_workload(train_data=Slow(*points().columns)), workers=2, micro_batch=7) as loop:
        next(loop.run())
        assert len(multiprocessing.active_children()) == 2
    assert not multiprocessing.active_children()


def test_off_the_main_thread_no_signal_is_touched() -> None:
    before = signal.getsignal(signal.SIGCHLD)
    done = []

    def work() -> None:
        with looping(augmented(), workers=1) as loop:
            done.append(len(list(loop.run())))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [6]
    assert signal.getsignal(signal.SIGCHLD) is before


def test_what_workers_cannot_be_sent_is_known_before(monkeypatch: pytest.MonkeyPatch) -> None:
    join = SeededCollate(data=points(), collate=None, seed=0)
    window = GlobalBatch(0, 0, list(range(4)))
    (batch,) = SeededFeed(join).collated(window, 4)
    assert why_not_sent(join, batch) is None
    assert "cannot be sent" in (why_not_sent(join, {"lock": threading.Lock()}) or "")
    assert "on a card" in (why_not_sent(join, torch.empty(1, device="meta")) or "")
    local = SeededCollate(data=points(), collate=lambda samples: samples, seed=0)
    assert why_not_sent(local, batch) is None or sys.platform != "linux"
    monkeypatch.setattr("autobatch.workload.loader.start_method", lambda: None)
    assert "cannot be sent" in (why_not_sent(local, batch) or "")


SLOW = """
import time, os, random, numpy
class Slow(torch.utils.data.Dataset):
    def __init__(self, data): self.data = data
    def __len__(self): return len(self.data)
    def __getitem__(self, index):
        time.sleep(0.002)
        inputs, targets = self.data[index]
        return inputs + random.random() + float(numpy.random.normal()) + torch.randn(4), targets
def workload():
    return small(train_data=Slow(data()))
"""


OPTIONS: dict[str, Any] = {
    "target_batch": 16,
    "max_micro_batch": 4,
    "trials": 0,
    "device": "cpu",
    "memory_budget": "64MiB",
}


def words(options: dict[str, Any]) -> list[object]:
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]


@contextmanager
def started(folder: Path, *options: object):
    """A run in a process group of its own."""
    process = subprocess.Popen(
        command("fit", "train.py:workload", "--out", "run", "--json", *words(OPTIONS), *options),
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def trained(process: subprocess.Popen[str], folder: Path, steps: int) -> list[int]:
    """Wait until so many steps are behind it; the ids of its workers."""
    metrics = folder / "run" / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < steps:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    return children_of(process.pid)


@LINUX
def test_a_signal_to_the_whole_group_stops_the_run_with_one_checkpoint(tmp_path: Path) -> None:
    """… and the run that goes on, with other workers, ends as the one that was never stopped."""
    (tmp_path / "train.py").write_text(SMALL + SLOW)
    with started(tmp_path, "--steps", 1000, "--workers", 2) as process:
        workers = trained(process, tmp_path, 3)
        assert len(workers) == 2
        os.killpg(process.pid, signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert "Traceback" not in err
    assert ended(workers)
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step-"))
    options = {**OPTIONS, "steps": step + 3}
    fit(f"{tmp_path / 'train.py'}:workload", out=tmp_path / "run", resume=True, workers=0, **options)
    fit(f"{tmp_path / 'train.py'}:workload", out=tmp_path / "straight", sample_seeds=True, **options)
    weights = [tmp_path / folder / "model.safetensors" for folder in ("run", "straight")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def fed_in_a_fork(tell: int) -> None:
    """Be fed for ever, by workers whose ids are told."""
    os.setsid()
    workload = make_workload(train_data=Slow(*points().columns))
    sampler = GlobalBatchSampler(samples=24, target_batch=7, seed=0, steps=10**9)
    with stop_on_signals(), open_feed(workload, sampler.batches, seed=0, workers=2) as feed:
        assert feed is not None
        for window in sampler.batches():
            for _ in feed.collated(window, 7):
                workers = [child.pid for child in multiprocessing.active_children()]
                os.write(tell, f"{json.dumps(workers)}\n".encode())


@LINUX
@pytest.mark.parametrize(
    ("signals", "code"),
    [([signal.SIGTERM, signal.SIGINT], signal.SIGINT), ([signal.SIGKILL], signal.SIGKILL)],
)
def test_a_run_that_ends_at_once_takes_its_workers_with_it(signals: list[int], code: int) -> None:
    listen, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            fed_in_a_fork(tell)
        finally:
            os._exit(0)
    os.close(tell)
    with os.fdopen(listen) as lines:
        workers = json.loads(lines.readline())
        assert len(workers) == 2
        for number in signals:
            time.sleep(0.1)
            send = os.kill if number == signal.SIGKILL else os.killpg
            send(pid, number)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signals[-1]
        assert ended(workers, seconds=3)


def test_an_error_in_a_worker_exits_with_2_and_one_line(tmp_path: Path) -> None:
    code = SLOW.replace("        time.sleep(0.002)\n", "        if index == 17: raise KeyError('gone')\n")
    (tmp_path / "train.py").write_text(SMALL + code)
    ran = autobatch(tmp_path, "fit", "train.py:workload", "--workers", 2, *words(OPTIONS))
    assert ran.code == 2
    line = (SMALL + code).splitlines().index("        if index == 17: raise KeyError('gone')") + 1
    assert f"the workload's data raised KeyError: 'gone' ({tmp_path / 'train.py'}:{line})" in ran.err


@pytest.mark.gpu
def test_on_a_gpu_batches_come_in_memory_that_it_reads_by_itself() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA card")
    workload = augmented()
    sampler = GlobalBatchSampler(samples=24, target_batch=10, seed=0, steps=3)
    gpu = torch.device("cuda", torch.cuda.device_count() - 1)
    batches = []
    for workers in (0, 2):
        with open_feed(
            workload, sampler.batches, seed=0, workers=workers, sample_seeds=True, gpu=gpu
        ) as feed:
            assert feed is not None
            batches.append([batch for window in sampler.batches() for batch in feed.collated(window, 4)])
    assert all(tensor.is_pinned() for batch in batches[1] for tensor in batch)
    for here, there in zip(*batches, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(here, there, strict=True))
    assert not multiprocessing.active_children()
