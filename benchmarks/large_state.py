"""Save and resume a run whose state passes 4 GiB, and the host memory that this takes.

python -m benchmarks.large_state [--gib 4] [--tensors 1] [--save]

The state is one tensor of that size, or several, which the model holds as buffers. A thread reads the memory
of this process a hundred times per second.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autobatch import Progress, Workload
from autobatch.core.units import GiB
from autobatch.planning import make_plan
from autobatch.rehearsal.setup import open_setup
from autobatch.training.build import build_sampler
from autobatch.training.checkpoint import list_checkpoints, load_newest
from autobatch.training.resume import check_content, load_run_state
from autobatch.training.run import RunInputs, train_plan
from autobatch.training.run_folder import CHECKPOINTS, RunFiles
from benchmarks.report import arguments, save
from benchmarks.tiny_run import SAMPLES, tiny_run, tiny_workload, weights_of

STEPS = 2


class Tables(nn.Module):
    """A model beside buffers that it does not use."""

    def __init__(self, model: nn.Module, sizes: list[int]) -> None:
        super().__init__()
        self.model = model
        for number, size in enumerate(sizes):
            # Written, because pages that are only read take no memory.
            self.register_buffer(f"table_{number}", torch.full((size,), 1 + number, dtype=torch.uint8))

    def forward(self, inputs: Tensor) -> Any:
        """Run the model."""
        return self.model(inputs)


@contextmanager
def peak_memory(found: dict[str, int], name: str) -> Iterator[None]:
    """Measure the most bytes that this process takes within the block, without the pages of files."""
    found[name] = 0
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            found[name] = max(found[name], memory_taken())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def memory_taken() -> int:
    """Return the bytes that this process takes now, without the pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("RssAnon:"))) * 1024


def trained(out: Path, workload: Workload, *, steps: int, resume: bool = False) -> nn.Module:
    """Train as planned by hand, because a probe would copy the model, and return it."""
    options = tiny_run(out, steps=steps).options
    stored = load_run_state(out) if resume else None
    inputs = RunInputs(
        setup=open_setup(workload, options),
        plan=make_plan(target_batch=8, micro_batch_limit=4, learning_rate=0.01),
        sampler=build_sampler(SAMPLES, options),
        key={},
        resumed=stored,
        is_exact=True,
    )
    return train_plan(inputs, RunFiles(out=out, options=options), progress=Progress())[1]


def large_state(root: Path, size: int, tensors: int) -> dict[str, Any]:
    """Train with a large state, resume, and load; return what was measured, in bytes and seconds.

    Args:
        root: an empty folder.
        size: bytes of the state, at least.
        tensors: into how many it is cut.
    """
    small = tiny_workload()
    trained(root / "small", small, steps=STEPS)
    expected = weights_of(trained(root / "small", small, steps=STEPS + 1, resume=True))
    sizes = [size // tensors + 64] * tensors
    before = memory_taken()
    workload = replace(small, model=lambda: Tables(small.model(), sizes))  # type: ignore[operator]
    peaks: dict[str, int] = {}
    seconds = {}
    for name, steps in (("train and save", STEPS), ("resume, train and save", STEPS + 1)):
        start = time.perf_counter()
        with peak_memory(peaks, name):
            model = trained(root / "large", workload, steps=steps, resume=steps > STEPS)
        seconds[name] = round(time.perf_counter() - start, 1)
        is_same = all(bool((one == 1 + number).all()) for number, one in enumerate(_tables(model)))
        found = weights_of(model)
        del model
        gc.collect()
    start = time.perf_counter()
    with peak_memory(peaks, "load"):
        loaded = load_newest(root / "large" / CHECKPOINTS, check_content)
    seconds["load"] = round(time.perf_counter() - start, 1)
    assert loaded is not None
    files = [file.stat().st_size for file in list_checkpoints(root / "large" / CHECKPOINTS)[-1].iterdir()]
    return {
        "state_bytes": sum(sizes),
        "largest_file_bytes": max(files),
        "same_weights": torch.equal(found, expected) and is_same,
        "copies": {name: round((peak - before) / sum(sizes), 2) for name, peak in peaks.items()},
        "seconds": seconds,
    }


def _tables(model: nn.Module) -> list[Tensor]:
    return [one for name, one in model.named_buffers() if name.startswith("table")]


def main() -> int:
    """Measure, and print the figures as JSON."""
    given = arguments(__doc__, gib=4.0, tensors=1, save=False)
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as root:
        found = large_state(Path(root), int(given.gib * GiB), given.tensors)
    text = json.dumps(found, indent=1)
    print(text)
    if given.save:
        save(f"large-state-{given.tensors}", f"```json\n{text}\n```\n")
    return int(not found["same_weights"])


if __name__ == "__main__":
    raise SystemExit(main())
