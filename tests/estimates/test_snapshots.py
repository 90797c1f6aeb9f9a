"""Estimates from memory snapshots, by the command, against recordings of real GPUs and brute force."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from autobatch.cli import main as cli
from autobatch.core.units import GiB, MiB
from autobatch.device.allocator import CachingAllocator
from autobatch.device.trace import read_recordings
from benchmarks.published.recordings import read, replays_of
from tests.support.planted import Calling
from tests.support.torch_snapshots import RECORDINGS, segment, snapshot_of, write

Answer = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Answer:
    """Run ``estimate`` with snapshots; return its JSON, or the line on standard error if it is refused."""
    monkeypatch.setenv("AUTOBATCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    def estimate(snapshots: dict[object, object], *words: object, code: int = 0) -> Any:
        given = []
        for size, content in snapshots.items():
            path = tmp_path / f"{size}.pickle"
            if isinstance(content, bytes):
                path.write_bytes(content)
            elif content is not None:
                write(path, content)
            given += ["--snapshot", f"{size}={path.name}" if isinstance(size, int) else path.name]
        found = cli.run(["estimate", *given, *map(str, words), "--json"])
        out, err = capsys.readouterr()
        assert found == code, err
        if code:
            last = err.splitlines()[-1]
            assert last.startswith("autobatch: ")
            assert "Traceback" not in err
            assert out == ""
            return last
        return json.loads(out)

    return estimate


def reserved_peak(name: str) -> int:
    """Return the peak of the memory that a GPU gave, from the segments of a recording alone."""
    return replays_of([read(RECORDINGS / f"{name}.csv.gz")])[0].peak_bytes


@pytest.mark.parametrize(
    ("name", "lengths", "tolerance"),
    [
        ("context-{}-forward", (100, 150, 200), 0),
        ("context-{}-step", (100, 150, 200), 0),
        ("decoder-xl-{}", (128, 256, 512), 0),
        ("decoder-small-{}-step", (128, 256, 512), 0.02),
        ("decoder-large-{}", (128, 256, 512), 0.004),
    ],
)
def test_two_lengths_on_a_gpu_give_the_reserved_peak_of_the_third(run, name, lengths, tolerance):
    *known, third = lengths
    snapshots = {length: snapshot_of(name.format(length)) for length in known}
    words = ("--micro-batch", third, "--max-micro-batch", third, "--profile", "h200", "--profile", "b200")
    found = run(snapshots, *words)["estimates"][0]
    peaks = [reserved_peak(name.format(length)) for length in lengths]
    assert found["peak_reserved_bytes"] == pytest.approx(peaks[2], rel=tolerance, abs=0)
    line = peaks[0] + (peaks[1] - peaks[0]) * (third - lengths[0]) / (lengths[1] - lengths[0])
    assert abs(found["peak_reserved_bytes"] - peaks[2]) < abs(line - peaks[2])


@pytest.mark.parametrize("name", ["context-200-step", "expandable/decoder-128", "streams/ten"])
def test_the_peak_of_one_recording_is_that_of_the_gpu(run, name):
    found = run({"one": snapshot_of(name)})["recorded"]
    assert found["peak_reserved_bytes"] == found["needed_bytes"] == reserved_peak(name)
    assert 0 < found["peak_allocated_bytes"] <= found["peak_reserved_bytes"]
    if "expandable" in name:
        assert found["expandable_bytes"] == found["needed_bytes"]
    assert sum(found["fits"].values()) > 10


class Gpu:
    """An allocator that records what it does, as torch does."""

    def __init__(self) -> None:
        self.model = CachingAllocator(None, addresses=self._claim)
        self.events: list[dict[str, Any]] = []
        self.segments: dict[int, int] = {}
        self.blocks: dict[int, tuple[Any, int]] = {}
        self.free_address = 1 << 40

    def _claim(self, size: int) -> int:
        address, self.free_address = self.free_address, self.free_address + 2 * size
        self.segments[address] = size
        self.events.append({"action": "segment_alloc", "addr": address, "size": size, "stream": 0})
        return address

    def take(self, size: int, *lines: str) -> int:
        """Take a block at a line of code, for example ``train.py:3``, the innermost first."""
        block = self.model.malloc(size)
        assert block is not None
        frames = [
            {"filename": line.split(":")[0], "line": int(line.split(":")[1]), "name": "step"}
            for line in lines
        ]
        event = {"action": "alloc", "addr": block.address, "size": size, "stream": 0, "frames": frames}
        self.events.append(event)
        self.blocks[block.address] = block, size
        return block.address

    def drop(self, address: int) -> None:
        block, size = self.blocks.pop(address)
        for action in ("free_requested", "free_completed"):
            self.events.append({"action": action, "addr": address, "size": size, "stream": 0, "frames": []})
        self.model.free(block)

    def snapshot(self) -> dict[str, Any]:
        segments = []
        for start, size in self.segments.items():
            live = sorted(
                (at, size_of) for at, (_, size_of) in self.blocks.items() if start <= at < start + size
            )
            segments.append(segment(start, size, live))
        return {"segments": segments, "device_traces": [self.events]}


Sizes = list[tuple[str, int, int, int]]
"""The blocks of a step: a line, bytes, bytes per sample, and after how many further blocks it is freed."""


def a_step(seed: int) -> Sizes:
    draw = random.Random(seed)
    return [
        (
            f"/home/me/train.py:{number}",
            *draw.choice([(draw.randrange(1, 5 * MiB), 0), (0, draw.randrange(1, MiB))]),
            draw.randrange(1, 40),
        )
        for number in range(60)
    ]


def ran(step: Sizes, m: int, *, scratch_from: int = 10**9) -> Gpu:
    """Run a step twice at a size; a sum in it takes two further blocks from some size on."""
    gpu = Gpu()
    for _ in range(2):
        due: dict[int, list[int]] = {}
        for number, (line, constant, slope, life) in enumerate(step):
            if m >= scratch_from and number % 10 == 5:
                scratch = [gpu.take(3 * MiB, f"/home/me/sum.py:{number}"), gpu.take(16)]
                for address in scratch:
                    gpu.drop(address)
            due.setdefault(number + life, []).append(gpu.take(constant + slope * m, line))
            for address in due.pop(number, []):
                gpu.drop(address)
        for addresses in due.values():
            for address in addresses:
                gpu.drop(address)
    return gpu


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sizes", [(4, 12), (5, 8, 20)])
def test_the_largest_size_is_that_of_brute_force(run, seed, sizes):
    """Of which no other fits: all larger sizes run out of the budget, too."""
    step, budget = a_step(seed), 600 * MiB
    words = f"--profile t4 --profile a10 --memory-budget {budget} --target-batch 480 --ranks 2"
    snapshots = {m: ran(step, m, scratch_from=10).snapshot() for m in sizes}
    found = run(snapshots, *words.split())
    peaks = {m: ran(step, m, scratch_from=10).model.peak_reserved_bytes for m in range(10, 120)}
    first, second = found["estimates"]
    most = max(m for m, peak in peaks.items() if peak <= budget)
    assert 20 < most < 119
    assert first["micro_batch"] == second["micro_batch"] == most
    part = max(m for m in range(1, most + 1) if 240 % m == 0)
    assert first["plan"]["micro_batches"] == [part] * (240 // part)
    assert first["peak_reserved_bytes"] == peaks[most]
    assert first["micro_batch_low"] <= most <= first["micro_batch_high"]
    assert any("14 blocks" in note or "12 blocks" in note or "24 blocks" in note for note in found["notes"])


def test_what_lives_at_the_peak_is_listed_by_the_users_own_line(run):
    gpu = Gpu()
    library = "/usr/lib/python3.11/site-packages/torch/nn/linear.py:7"
    gpu.take(30 * MiB, "/home/me/model.py:3")
    for _ in range(2):
        gone = gpu.take(64 * MiB, "/home/me/model.py:9")
        gpu.drop(gone)
    gpu.take(8 * MiB, library, "/home/me/train.py:12")
    gpu.take(4 * MiB, library)
    gpu.take(100 * MiB)
    found = run({"one": gpu.snapshot()})["recorded"]
    assert found["memory"] == {
        "model.py:3 step": 30 * MiB,
        "train.py:12 step": 8 * MiB,
        "linear.py:7 step": 4 * MiB,
        "without a line": 100 * MiB,
    }
    assert found["peak_allocated_bytes"] == 142 * MiB


def test_a_recording_from_the_middle_has_what_is_older(tmp_path):
    """As if its ring had overflowed: the latest events only, and the segments at the end."""
    whole = ran(a_step(3), 30)
    kept = whole.take(77 * MiB)
    content = whole.snapshot()
    events = content["device_traces"][0]
    late = len(events) // 2
    before: dict[int, int] = {}
    for event in events[:late]:
        if event["action"] == "alloc":
            before[event["addr"]] = event["size"]
        elif event["action"] == "free_completed":
            del before[event["addr"]]
    assert before
    assert kept not in before
    (found,) = read_recordings(write(tmp_path / "late", {**content, "device_traces": [events[late:]]}))
    assert found.peak_reserved_bytes == whole.model.peak_reserved_bytes
    assert found.older == (len(before), sum(before.values()))


def test_the_newest_format_says_the_same(tmp_path):
    content = ran(a_step(2), 20).snapshot()
    known = read_recordings(write(tmp_path / "old", content))
    newest = pickle.loads(pickle.dumps(content)) | {"host_segments": [], "host_traces": []}
    newest["allocator_settings"] = {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False}
    for part in newest["segments"]:
        part |= {"segment_pool_id": (0, 0), "is_expandable": False}
    for event in newest["device_traces"][0]:
        event |= {"pool_id": (0, 0), "user_metadata": "", "time_us": 7}
    newest["device_traces"].append([])
    assert read_recordings(write(tmp_path / "new", newest)) == known


def test_a_hostile_file_runs_nothing(run, tmp_path):
    sentinel = tmp_path / "sentinel"
    content = snapshot_of("context-100-forward")
    for place in (content, content["segments"][0], content["device_traces"][0][0]):
        place["more"] = Calling(Path.touch, sentinel)
        assert "no memory snapshot" in run({1: content, 2: content}, code=2)
        del place["more"]
    hostile = pickle.dumps(Calling(Path.touch, sentinel), 0)
    assert "no memory snapshot" in run({1: hostile, 2: hostile}, code=2)
    assert not sentinel.exists()


def test_recordings_that_part_too_far_give_no_answer(run):
    step = a_step(4)
    other = [(line.replace("train", "other"), *sizes) for line, *sizes in step]
    line = run({4: ran(step, 4).snapshot(), 12: ran(other, 12).snapshot()}, code=2)
    assert "part too far" in line
    assert "train.py:" in line
    big = ran(step, 12)
    big.take(GiB, "/home/me/train.py:99")
    assert "part too far" in run({4: ran(step, 4).snapshot(), 12: big.snapshot()}, code=2)


def out_of_memory(free: int = 10, asked: int = 90, *, pieces: Sequence[int] = (30, 40)) -> dict[str, Any]:
    """Return a recording that ends out of memory, with free pieces beside a block that is held."""
    gpu = Gpu()
    gpu.take(100 * MiB, "/home/me/train.py:5")
    for piece in pieces:
        gpu.drop(gpu.take(piece * MiB))
    gpu.events.append(
        {"action": "oom", "device_free": free * MiB, "size": asked * MiB, "stream": 0, "frames": []}
    )
    return gpu.snapshot()


@pytest.mark.parametrize(
    ("free", "asked", "reason"), [(10, 75, "fragmented"), (10, 90, "full"), (200, 90, "limited")]
)
def test_an_error_out_of_memory_is_explained(run, free, asked, reason):
    found = run({"one": out_of_memory(free, asked)})["recorded"]
    assert found["refused"] == {
        "asked_bytes": asked * MiB,
        "device_free_bytes": free * MiB,
        "allocated_bytes": 100 * MiB,
        "reserved_bytes": 170 * MiB,
        "reason": reason,
    }
    assert found["needed_bytes"] == found["peak_reserved_bytes"] + (asked + asked % 2) * MiB
    assert found["expandable_bytes"] <= found["needed_bytes"]
    assert found["memory"] == {"train.py:5 step": 100 * MiB}


ONE_EVENT = {"action": "alloc", "addr": 5, "size": 9}
NO_SNAPSHOTS = [
    b"",
    b"PK\x03\x04 no pickle",
    [],
    {},
    {"segments": [], "device_traces": [[]]},
    {"segments": [], "device_traces": [[ONE_EVENT | {"addr": "x", "size": "y"}]]},
    {"segments": [], "device_traces": [[ONE_EVENT | {"size": -9}]]},
    {"segments": [], "device_traces": [[ONE_EVENT | {"frames": [3]}]]},
    {"segments": 3, "device_traces": 4},
]


@pytest.mark.parametrize(
    ("snapshots", "words", "word"),
    [
        *(({1: content, 2: content}, (), "1.pickle") for content in NO_SNAPSHOTS),
        ({"a": {}, "b": {}}, (), "size"),
        ({"missing": None}, (), "missing.pickle"),
        ({1: {}, 2: {}, 3: {}, 4: {}}, (), "three"),
        ({1: None, 2: {}}, (), "1.pickle"),
        ({4: out_of_memory(), 2: snapshot_of("context-100-forward")}, (), "memory"),
        ({1: {}, 2: {}}, ("--precision", "bf16"), "precision"),
        ({1: {}, 2: {}}, ("--ranks", "2", "--parallel", "shard"), "parallel"),
        ({1: {}, 2: {}}, ("--profile", "none-such"), "none-such"),
    ],
)
def test_wrong_files_and_words_are_refused(run, snapshots, words, word):
    assert word in run(snapshots, *words, code=2)


def test_nothing_that_fits_is_exit_code_3(run):
    step = a_step(1)
    snapshots = {m: ran(step, m).snapshot() for m in (4, 12)}
    line = run(snapshots, "--profile", "t4", "--memory-budget", "20MiB", code=3)
    assert "train.py" in line
