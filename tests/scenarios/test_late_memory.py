"""Memory that comes late, where no probe saw it: repeated smaller once, with the reason, and exact."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autobatch import Progress, Workload
from autobatch.core.units import GiB, MiB
from autobatch.device.profiles import load_profile
from autobatch.device.simulated import SimulatedDevice
from autobatch.training.run import train
from tests.support.runs import rows, settings
from tests.support.training import Rows, apart, make_loop, mean_loss, weights

FROM, STEPS, TARGET = 4, 7, 64
SAMPLE_BYTES = 40 * MiB
"""Taken by the late layer on the CPU for each sample."""


class Late(nn.Module):
    """Network that takes more memory from a step on. It counts steps, not passes, in a buffer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.inner, self.outer = nn.Linear(16, 64), nn.Linear(64, 3)
        self.extra = nn.Sequential(*(one for _ in range(4) for one in (nn.Linear(64, 64), nn.Tanh())))
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        is_late = bool(self.steps >= FROM)
        if self.kind == "longer samples" and self.training and not is_late:
            inputs = inputs[:, :4]
        hidden = self.inner(inputs).relu()
        if self.kind == "a layer" and is_late:
            hidden = self.extra(hidden)
        if self.kind == "on the host" and is_late:
            hidden = (
                hidden + 0 * torch.empty(len(hidden), SAMPLE_BYTES // 8, dtype=torch.float64)[0, :0].sum()
            )
        return self.outer(hidden.mean(1))


def samples(number: int, length: int, seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(number, length, 16, dtype=torch.float64, generator=generator)
    return Rows(inputs, torch.randint(3, (number,), generator=generator))


def late_workload(kind: str) -> Workload:
    models = list[Late]()

    def build() -> Late:
        models.append(Late(kind))
        return models[-1]

    def optimizer(parameters: Any, rate: float) -> torch.optim.Optimizer:
        made, model = torch.optim.AdamW(parameters, lr=rate), models[-1]
        made.register_step_post_hook(lambda *_: model.steps.add_(1))
        return made

    return Workload(
        model=build,
        train_data=samples(128, 24),
        validation_data=samples(48, 128 if kind == "validation" else 24, seed=1),
        loss=mean_loss,
        optimizer=optimizer,
        learning_rate=0.01,
    )


class Heard(Progress):
    """Progress that keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def trained(kind: str, out: Path, heard: Progress, *, micro_batch: int, gpu: Any = None) -> Any:
    """Train on a simulated GPU, or on the CPU; return the weights and the record."""
    options = {"target_batch": TARGET, "micro_batch": micro_batch, "steps": STEPS}
    files, workload = settings(out, target_batch=TARGET, validate_every=3), late_workload(kind)
    if gpu is None:
        loop = make_loop(workload, **options)
        record = train(loop, files, heard, None)
        return weights(loop.train_state.model), record
    with gpu.training() as meter:
        loop = make_loop(workload, **options, device=gpu, meter=meter)
        meter.count(one.data for one in loop.train_state.model.parameters())
        record = train(loop, files, heard, None)
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


@pytest.mark.parametrize(("kind", "budget"), [("longer samples", "2MiB"), ("a layer", "4MiB")])
def test_a_step_that_takes_more_than_those_before_runs_again_in_smaller_micro_batches_once(
    kind: str, budget: str, tmp_path: Path
) -> None:
    gpu = SimulatedDevice(load_profile("rtx-4090", user_dir=tmp_path), memory_budget=budget)
    heard, silent = Heard(), Heard()
    whole, expected = trained(kind, tmp_path / "whole", silent, micro_batch=TARGET)
    found, record = trained(kind, tmp_path / "run", heard, micro_batch=TARGET, gpu=gpu)
    assert apart(found, whole) <= 1e-12
    assert record.validation == pytest.approx(expected.validation, rel=1e-12)
    check_told(tmp_path / "run", heard.notes, record)
    assert silent.notes == []


def check_told(out: Path, notes: list[str], record: Any) -> None:
    """Check that one step ran again, smaller, that the rest kept to it, and that the reason was told."""
    metrics = rows(out)
    assert [row["step"] for row in metrics if row["recovered"]] == [FROM + 1]
    assert [row["micro_batch"] for row in metrics] == [TARGET] * FROM + [32] * (STEPS - FROM)
    (told,) = notes
    assert told.startswith(f"step {FROM + 1}: out of memory, repeated at micro-batch 32: ")
    assert f"it had fitted in {FROM} steps, so this one takes more" in told
    assert record.notes == notes


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of the address space is Linux's")
def test_a_step_that_takes_more_than_the_host_has_runs_again_in_smaller_micro_batches(tmp_path: Path) -> None:
    heard = Heard()
    whole, _ = trained("on the host", tmp_path / "whole", heard, micro_batch=TARGET)
    # 64 samples take 2.5 GiB in the late layer, and 32 of them half of it.
    with address_space(2 * GiB):
        found, record = trained("on the host", tmp_path / "run", heard, micro_batch=TARGET)
    assert apart(found, whole) <= 1e-12
    check_told(tmp_path / "run", heard.notes, record)
    assert "DefaultCPUAllocator: can't allocate memory" in heard.notes[0]


def test_a_validation_that_takes_more_than_the_training_runs_on_in_smaller_micro_batches(
    tmp_path: Path,
) -> None:
    gpu = SimulatedDevice(load_profile("rtx-4090", user_dir=tmp_path), memory_budget="2MiB")
    heard = Heard()
    whole, expected = trained("validation", tmp_path / "whole", Heard(), micro_batch=TARGET)
    found, record = trained("validation", tmp_path / "run", heard, micro_batch=32, gpu=gpu)
    assert apart(found, whole) <= 1e-12
    assert record.validation == pytest.approx(expected.validation, rel=1e-12)
    metrics = rows(tmp_path / "run")
    assert [row["step"] for row in metrics if row["validation"]] == [3, 6]
    assert {row["micro_batch"] for row in metrics} == {32}, "the training keeps its micro-batch"
    assert not any(row["recovered"] for row in metrics)
    (told,) = heard.notes
    assert told.startswith("out of memory in validation at a micro-batch of 32, continued at 8: ")
    assert record.notes == [told]
