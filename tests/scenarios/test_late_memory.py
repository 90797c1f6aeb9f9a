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

from autobatch import Training
from autobatch.core.units import GiB, MiB
from tests.support.probes import Listener
from tests.support.runs import rows, settings
from tests.support.runs import train as run_loop
from tests.support.training import adamw, apart, make_loop, make_workload, network, points, then, weights

SINCE, STEPS = 4, 7
TARGET = 64
SAMPLE_BYTES = 40 * MiB
"""Taken by the late layer for each sample in training; in validation, half as much again."""


class Late(nn.Sequential):
    """Network that may take more memory from a step on. It counts steps, not passes, in a buffer."""

    def __init__(self, is_late: bool) -> None:
        super().__init__(network())
        self.is_late = is_late
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        if self.is_late and int(self.steps) >= SINCE:
            size = SAMPLE_BYTES if self.training else SAMPLE_BYTES * 3 // 2
            outputs = outputs + torch.empty(len(inputs), size, dtype=torch.uint8)[0, :0].sum()
        return outputs


def train(out: Path, heard: Listener, *, is_late: bool) -> tuple[Tensor, Training]:
    """Train with three validations; return the weights and the record."""
    workload = make_workload(
        model=lambda: Late(is_late),
        train_data=points(128),
        validation_data=points(48, seed=1),
        optimizer=then(adamw, lambda model: model.steps.add_(1)),
        learning_rate=0.01,
    )
    loop = make_loop(workload, target_batch=TARGET, micro_batch=TARGET, steps=STEPS)
    record = run_loop(loop, settings(out, target_batch=TARGET, validate_every=STEPS // 2), heard)
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
def test_a_step_and_a_validation_that_take_more_than_the_host_has_run_again_smaller_once(
    tmp_path: Path,
) -> None:
    heard, silent = Listener(), Listener()
    whole, expected = train(tmp_path / "whole", silent, is_late=False)
    # 64 samples take 2.5 GiB in a step, and 48 of them 2.8 GiB in a validation.
    with address_space(2 * GiB):
        found, record = train(tmp_path / "run", heard, is_late=True)
    assert apart(found, whole) <= 1e-12
    assert record.validation == pytest.approx(expected.validation, rel=1e-12)
    metrics = rows(tmp_path / "run")
    assert [row["step"] for row in metrics if row["validation"]] == [3, 6]
    assert [row["step"] for row in metrics if row["recovered"]] == [SINCE + 1]
    assert [row["micro_batch"] for row in metrics] == [TARGET] * SINCE + [32] * (STEPS - SINCE)
    in_step, in_validation = heard.notes
    assert in_step.startswith(f"step {SINCE + 1}: out of memory, repeated at micro-batch 32: ")
    assert in_validation.startswith("out of memory in validation at a micro-batch of 48: ")
    assert in_validation.endswith("Continued at 24")
    assert all("DefaultCPUAllocator: can't allocate memory" in note for note in heard.notes)
    assert record.notes == heard.notes
    assert silent.notes == []
