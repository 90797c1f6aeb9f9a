"""A plain program of torch, recorded as it is, against the same program under a limit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.commandline import environment

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


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM, encoding="utf-8")
    return path


def call(folder: Path, *words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command of autobatch, or Python, on the first GPU, or on a stub that no other process uses."""
    (folder / "table").touch()
    alone = {"CUDA_VISIBLE_DEVICES": "0", "STUB_GPU_STATE": str(folder / "table")}
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env=environment(folder, **{**alone, **variables}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def recorded(program: Path, size: int, *words: str, limit: int = 0, **variables: str) -> tuple[Path, Any]:
    """Record the program at a size; return the file, and what it printed."""
    out = program.parent / f"{size}.pickle"
    line = ("-m", "autobatch", "record", "--out", out, *words, "--", sys.executable, program, size, limit)
    done = call(program.parent, *line, **variables)
    assert done.returncode == int(not done.stdout), done.stderr
    return out, json.loads(done.stdout or "{}")


def estimated(folder: Path, *words: object) -> Any:
    done = call(folder, "-m", "autobatch", "estimate", *words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("limit", [400, 1000])
def test_the_largest_size_of_two_snapshots_runs_and_one_more_does_not(program: Path, limit: int) -> None:
    files = {size: recorded(program, size, "--steps", "3")[0] for size in (8, 24)}
    words = [word for size, path in files.items() for word in ("--snapshot", f"{size}={path}")]
    (found,) = estimated(program.parent, *words, "--profile", "t4", "--memory-budget", f"{limit}MiB")[
        "estimates"
    ]
    size = found["micro_batch"]
    assert size > 24
    stats = json.loads(call(program.parent, program, size, limit).stdout)
    assert stats["num_alloc_retries"] == 0
    assert stats["reserved_bytes.all.peak"] == found["peak_reserved_bytes"]
    more = call(program.parent, program, size + 1, limit)
    assert more.returncode or json.loads(more.stdout)["num_alloc_retries"]


def test_an_error_out_of_memory_is_recorded(program: Path) -> None:
    out, printed = recorded(program, 512, limit=300)
    assert printed == {}
    refused = estimated(program.parent, "--snapshot", out)["recorded"]["refused"]
    assert refused["reserved_bytes"] <= 300 << 20 < refused["reserved_bytes"] + refused["asked_bytes"]
    assert refused["reason"] in ("limited", "fragmented")


def test_one_snapshot_has_the_peaks_of_torch(program: Path) -> None:
    out, stats = recorded(program, 24)
    found = estimated(program.parent, "--snapshot", out)["recorded"]
    assert found["peak_allocated_bytes"] == stats["allocated_bytes.all.peak"]
    assert found["peak_reserved_bytes"] == stats["reserved_bytes.all.peak"]
    assert any(line.startswith("train.py:") for line in found["memory"])
    _, expandable = recorded(program, 24, PYTORCH_ALLOC_CONF="expandable_segments:True")
    assert found["expandable_bytes"] == expandable["reserved_bytes.all.peak"]
