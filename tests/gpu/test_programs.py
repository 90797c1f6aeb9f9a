"""A plain program of torch, recorded or searched as it is, against the same program under a limit."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.limits import alone
from tests.support.commandline import Ran, autobatch

pytestmark = pytest.mark.gpu
PROGRAM = """
import json, sys, torch
from torch import nn

size, limit_mib = int(sys.argv[1]), int(sys.argv[2])
if limit_mib:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((limit_mib << 20) / total)

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

model = nn.Sequential(*[Block(256) for _ in range(6)], nn.Linear(256, 1000, bias=False)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    inputs = torch.randn(size, 64, 256).cuda()
    targets = torch.zeros(size * 64, dtype=torch.long).cuda()
    loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
stats = torch.cuda.memory_stats()
names = ("num_alloc_retries", "allocated_bytes.all.peak", "reserved_bytes.all.peak")
print(json.dumps({name: stats[name] for name in names}))
"""


def call(folder: Path, *words: object, **variables: str) -> Ran:
    """Run a command of autobatch on the first GPU, or on a stub that no other process uses."""
    (folder / "table").touch()
    (folder / "program.py").write_text(PROGRAM, encoding="utf-8")
    own = {"CUDA_VISIBLE_DEVICES": "0", "STUB_GPU_STATE": str(folder / "table")}
    return autobatch(folder, *words, timeout=300, **{**own, **variables})


def recorded(folder: Path, size: int, *, limit: int = 0, **variables: str) -> tuple[Path, Any]:
    """Record the program at a size; return the file, and what it printed."""
    out = folder / f"{size}.pickle"
    words = ("record", "--out", out, "--", sys.executable, "program.py", size, limit)
    done = call(folder, *words, **variables)
    assert done.code == int(not done.out), done
    return out, json.loads(done.out or "{}")


def plain(program: str, size: int, limit_mib: int) -> dict[str, int]:
    """Run a program as it is, in this process; return nothing if it runs out of memory."""
    sys.argv, printed = ["program.py", str(size), str(limit_mib)], io.StringIO()
    with contextlib.suppress(torch.OutOfMemoryError), contextlib.redirect_stdout(printed):
        exec(program, {"__name__": "__main__"})
    return json.loads(printed.getvalue() or "{}")


def ran(size: int, limit_mib: int, program: str = PROGRAM) -> dict[str, int]:
    """Return what a program prints in a process of its own; nothing if it had to empty the cache, either."""
    stats = alone(plain, program, size, limit_mib)
    return {} if stats.get("num_alloc_retries") else stats


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, Any]]:
    """Return the files of two sizes, with what the program printed."""
    folder = tmp_path_factory.mktemp("recordings")
    return {size: recorded(folder, size) for size in (8, 24)}


@pytest.mark.parametrize("limit", [400, 1000])
def test_the_largest_size_of_two_snapshots_runs_and_one_more_does_not(on_gpu, recordings, limit: int) -> None:
    words = [word for size, (path, _) in recordings.items() for word in ("--snapshot", f"{size}={path}")]
    done = on_gpu("estimate", *words, "--profile", "t4", "--memory-budget", f"{limit}MiB", "--json")
    (found,) = done.json["estimates"]
    size = found["micro_batch"]
    assert size > 24
    assert ran(size, limit)["reserved_bytes.all.peak"] == found["peak_reserved_bytes"]
    assert not ran(size + 1, limit)


def test_an_error_out_of_memory_is_recorded(on_gpu, tmp_path: Path) -> None:
    out, printed = recorded(tmp_path, 512, limit=300)
    assert printed == {}
    refused = on_gpu("estimate", "--snapshot", out, "--json").json["recorded"]["refused"]
    assert refused["reserved_bytes"] <= 300 << 20 < refused["reserved_bytes"] + refused["asked_bytes"]
    assert refused["reason"] in ("limited", "fragmented")


def test_one_snapshot_has_the_peaks_of_torch(on_gpu, recordings, tmp_path: Path) -> None:
    out, stats = recordings[24]
    found = on_gpu("estimate", "--snapshot", out, "--json").json["recorded"]
    assert found["peak_allocated_bytes"] == stats["allocated_bytes.all.peak"]
    assert found["peak_reserved_bytes"] == stats["reserved_bytes.all.peak"]
    assert any(line.startswith("program.py:") for line in found["memory"])
    _, expandable = recorded(tmp_path, 24, PYTORCH_ALLOC_CONF="expandable_segments:True")
    assert found["expandable_bytes"] == expandable["reserved_bytes.all.peak"]


@pytest.mark.parametrize(("limit", "empties"), [(400, True), (1000, False)])
def test_the_limit_of_a_program_runs_and_one_more_does_not(
    on_gpu, tmp_path: Path, limit: int, empties: bool
) -> None:
    emptying = "torch.cuda.empty_cache()\n    loss.backward()"  # as a search of cuDNN for its fastest kernels
    program = PROGRAM.replace("loss.backward()", emptying) if empties else PROGRAM
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    words = ("--memory-budget", f"{limit}MiB", "--json", "--", sys.executable, "program.py", "{}", 0)
    done = on_gpu("probe", *words)
    found = done.json["probe"]
    size = found["micro_batch"]
    assert found["oom_count"] <= empties  # small runs have an empty cache, whose emptying leaves no event
    assert ran(size, limit, program)
    assert not ran(size + 1, limit, program)
