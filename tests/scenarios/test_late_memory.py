"""Memory that comes late, where no probe saw it: repeated smaller once, with the reason, and exact."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autobatch import Training, Workload
from autobatch.core.units import GiB, MiB
from autobatch.device.cpu import CpuDevice, SimulatedDevice
from autobatch.device.profiles import load_profile
from autobatch.training.run import train as run_loop
from tests.support.probes import Listener
from tests.support.runs import rows, settings
from tests.support.training import Rows, apart, make_loop, make_workload, weights

SINCE, STEPS = 4, 7
TARGET = 64
SAMPLE_BYTES = 40 * MiB
"""Taken by the late layer on the host for each sample."""


class Late(nn.Module):
    """Network that may take more memory from a step on. It counts steps, not passes, in a buffer."""

    def __init__(self, is_late: bool) -> None:
        super().__init__()
        self.is_late = is_late
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.inner, self.outer = nn.Linear(16, 64), nn.Linear(64, 3)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.inner(inputs).relu()
        if self.is_late and int(self.steps) >= SINCE:
            hidden = hidden + torch.empty(len(hidden), SAMPLE_BYTES, dtype=torch.uint8)[0, :0].sum()
        return self.outer(hidden.mean(1))


def samples(number: int, length: int, seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(number, length, 16, dtype=torch.float64, generator=generator)
    return Rows(inputs, torch.randint(3, (number,), generator=generator))


def late_workload(kind: str) -> Workload:
    """Make a workload that takes more memory from a step on."""
    return make_workload(
        model=lambda: Late(kind == "on the host"),
        train_data=samples(128, 24),
        validation_data=samples(48, 128 if kind == "validation" else 24, seed=1),
        optimizer=lambda parameters, rate: torch.optim.AdamW(parameters, lr=0.01),
        after_step=lambda model: model.steps.add_(1),
    )


def train(
    kind: str, out: Path, heard: Listener, *, micro_batch: int = TARGET, budget: str | None = None
) -> tuple[Tensor, Training]:
    """Train on the CPU, or a GPU with a budget, with three validations; return the weights and the record."""
    workload, files = late_workload(kind), settings(out, target_batch=TARGET, validate_every=STEPS // 2)
    device = (
        CpuDevice() if budget is None else SimulatedDevice(load_profile("rtx-4090"), memory_budget=budget)
    )
    with device.training() as meter:
        loop = make_loop(
            workload, target_batch=TARGET, micro_batch=micro_batch, steps=STEPS, device=device, meter=meter
        )
        meter.count(parameter.data for parameter in loop.train_state.model.parameters())
        record = run_loop(loop, files, heard)
        return weights(loop.train_state.model), record


@contextmanager
def address_space(more_bytes: int) -> Iterator[None]:
    """Let the process take so many more bytes of address space within the block."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of the address space is Linux's")
def test_a_step_that_takes_more_than_the_host_has_runs_again_in_smaller_micro_batches_once(
    tmp_path: Path,
) -> None:
    heard, silent = Listener(), Listener()
    whole, expected = train("on the host", tmp_path / "whole", silent)
    # 64 samples take 2.5 GiB in the late layer, and 32 of them half of it.
    with address_space(2 * GiB):
        found, record = train("on the host", tmp_path / "run", heard)
    assert apart(found, whole) <= 1e-12
    assert record.validation == pytest.approx(expected.validation, rel=1e-12)
    metrics = rows(tmp_path / "run")
    assert [row["step"] for row in metrics if row["recovered"]] == [SINCE + 1]
    assert [row["micro_batch"] for row in metrics] == [TARGET] * SINCE + [32] * (STEPS - SINCE)
    (told,) = heard.notes
    assert told.startswith(f"step {SINCE + 1}: out of memory, repeated at micro-batch 32: ")
    assert "DefaultCPUAllocator: can't allocate memory" in told
    assert record.notes == heard.notes
    assert silent.notes == []


def test_a_validation_that_takes_more_than_the_training_runs_on_in_smaller_micro_batches(
    tmp_path: Path,
) -> None:
    heard = Listener()
    whole, expected = train("validation", tmp_path / "whole", Listener())
    found, record = train("validation", tmp_path / "run", heard, micro_batch=32, budget="2MiB")
    assert apart(found, whole) <= 1e-12
    assert record.validation == pytest.approx(expected.validation, rel=1e-12)
    metrics = rows(tmp_path / "run")
    assert [row["step"] for row in metrics if row["validation"]] == [3, 6]
    assert {row["micro_batch"] for row in metrics} == {32}, "the training keeps its micro-batch"
    assert not any(row["recovered"] for row in metrics)
    for told, (size, smaller) in zip(heard.notes, [(32, 16), (16, 8)], strict=True):
        assert told.startswith(f"out of memory in validation at a micro-batch of {size}: ")
        assert told.endswith(f"Continued at {smaller}")
    assert record.notes == heard.notes
