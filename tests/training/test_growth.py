"""Memory that grows from step to step is told early and once, and nothing else is."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from autobatch import DoesNotFitError, RestartSmallerError
from autobatch.core.units import GiB, KiB, MiB
from autobatch.device.host import HostMemory
from autobatch.device.profiles import load_profile
from autobatch.device.simulated import SimulatedDevice
from autobatch.training.observers import MemoryWatch
from autobatch.training.run import train
from tests.support.probes import Listener
from tests.support.runs import rows, settings
from tests.support.training import make_loop, make_workload, mean_loss, points

BASE, STEP, BUDGET, STEPS = 100 * MiB, 20 * MiB, 1024 * MiB, 20_000
"""Bytes that are held between steps, those of a step, the budget, and the steps of a run."""
WORDS = "the budget", "Usually something is kept"
Curve = Callable[[int], float]
"""Bytes held after a step besides `BASE`."""


def noise(bytes_: int, seed: int = 0) -> list[float]:
    draws = random.Random(seed)
    return [draws.uniform(0, bytes_) for _ in range(STEPS + 1)]


ROUGH, SMALL, LENGTHS = noise(300 * MiB), noise(2 * MiB), noise(2 * MiB, seed=1)
SEEN = [0.0]
for _length in LENGTHS:
    SEEN.append(SEEN[-1] + _length)


def listen(curve: Curve, steps: int = STEPS) -> Iterator[tuple[int, str]]:
    """Yield what is told, and after which step; end where the budget is full."""
    held = peak = 0
    watch = MemoryWatch(steps, WORDS, read=lambda: held, room=lambda: BUDGET - peak)
    for step in range(1, steps + 1):
        held = BASE + round(curve(step))
        peak = max(peak, held + STEP)
        if peak > BUDGET:
            return
        told = watch.after_step(step, held)
        if told is not None:
            yield step, told


def full_at(curve: Curve) -> int:
    """Return the first step that does not fit."""
    return next(step for step in range(1, STEPS + 1) if BASE + round(curve(step)) + STEP > BUDGET)


@pytest.mark.parametrize(
    ("curve", "error"),
    [
        pytest.param(lambda step: step * 8 * MiB, 0.01, id="by as much each step"),
        pytest.param(lambda step: step * 160 * KiB, 0.01, id="slowly"),
        pytest.param(lambda step: max(0, step - 3000) * 4 * MiB, 0.1, id="from a late step on"),
        pytest.param(lambda step: SEEN[step], 0.4, id="by ragged samples"),
        pytest.param(lambda step: step * 160 * KiB + SMALL[step], 0.2, id="under fluctuation"),
        pytest.param(lambda step: step // 50 * 3 * MiB, 0.2, id="in every 50th step, as in validation"),
        pytest.param(lambda step: 64 * MiB * (step > 2) + step * MiB, 0.02, id="after a jump"),
    ],
)
def test_growth_is_told_once_and_early_with_the_step_that_fills_the_budget(
    curve: Curve, error: float
) -> None:
    ((step, told),) = listen(curve)
    full = full_at(curve)
    start = 3000 if curve(3000) == 0 else 0
    assert step - start <= (full - start) / 4
    (said,) = re.findall(r"full at about step ([\d,]+)", told)
    assert int(said.replace(",", "")) - step == pytest.approx(full - step, rel=error, abs=2)


@pytest.mark.parametrize(
    "curve",
    [
        pytest.param(lambda _: 0, id="nothing"),
        pytest.param(lambda step: ROUGH[step], id="fluctuation by a third of the room"),
        pytest.param(lambda step: step % 40 * 2 * MiB, id="a list that is emptied at every 40th step"),
        pytest.param(lambda step: min(step, 500) * 160 * KiB, id="a cache that fills"),
        pytest.param(lambda step: 100 * MiB * (1 - math.exp(-step / 300)), id="a cache by random keys"),
        pytest.param(lambda step: 10 * MiB * math.log(step), id="ever rarer keys"),
        pytest.param(lambda step: step * 32 * KiB, id="growth that the run outlives"),
        pytest.param(lambda step: 90 * MiB * (step >= 30) + ROUGH[step] / 30, id="averages from a step on"),
    ],
)
def test_what_does_not_fill_the_budget_is_not_told(curve: Curve) -> None:
    assert list(listen(curve)) == []


def test_garbage_that_python_has_not_collected_is_no_growth() -> None:
    asked = list[int]()
    watch = MemoryWatch(
        STEPS, WORDS, read=lambda: [asked.append(step), BASE][1], room=lambda: BUDGET - held - STEP
    )
    for step in range(1, 400):
        held = BASE + step % 200 * 4 * MiB
        assert watch.after_step(step, held) is None
    assert asked[0] <= 40
    assert all(after >= 2 * before for before, after in pairwise(asked))


def test_a_list_of_arrays_is_named_before_it_fills_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = list[Tensor]()
    others = random.Random(0)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        kept.append(torch.ones(2**19, dtype=torch.uint8))
        return mean_loss(model, batch)

    def free_bytes() -> int:
        return 256 * MiB - sum(one.nbytes for one in kept)

    # The rest of what a process holds fluctuates, here by as much each time.
    monkeypatch.setattr(
        "autobatch.training.loop.resident_bytes", lambda: GiB - free_bytes() + others.randrange(4 * MiB)
    )
    monkeypatch.setattr(
        "autobatch.training.loop.host_memory", lambda: HostMemory(GiB, free_bytes(), "for this test")
    )
    loop = make_loop(make_workload(loss=loss), micro_batch=24, steps=5_000)
    told = next(record.growth for record in loop.run() if record.growth is not None)
    assert free_bytes() > 0
    assert re.search(
        r"memory grows by (4\d\d|5\d\d) KiB a step, .* the memory of this machine is full at", told
    )


class Hidden(nn.Module):
    """Network that keeps its last activation, as models do for analysis."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(5, 512), nn.Linear(512, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        self.hidden = self.inner(inputs).relu()
        return self.outer(self.hidden)


@pytest.mark.parametrize(("steps", "ends"), [(400, True), (40, False)])
def test_a_list_of_losses_and_activations_is_named_before_it_fills_a_simulated_gpu(
    steps: int, ends: bool, tmp_path: Path
) -> None:
    kept = list[Any]()

    def loss(model: Any, batch: Any) -> Tensor:
        inputs, labels = batch
        found = cross_entropy(model(inputs), labels)
        kept.append((found, model.hidden))
        return found

    workload = make_workload(
        model=Hidden,
        train_data=points(64, dtype=torch.float32),
        loss=loss,
        optimizer=lambda params, rate: torch.optim.AdamW(params, lr=rate),
    )
    gpu = SimulatedDevice(load_profile("rtx-4090", user_dir=tmp_path), memory_budget="16MiB")
    heard, out = Listener(), tmp_path / "run"
    with gpu.training() as meter:
        loop = make_loop(workload, target_batch=64, micro_batch=32, steps=steps, device=gpu, meter=meter)
        meter.count(one.data for one in loop.train_state.model.parameters())
        if not ends:
            train(loop, settings(out, target_batch=64), heard, None)
            assert heard.notes == []
            return
        with pytest.raises((DoesNotFitError, RestartSmallerError)) as caught:
            train(loop, settings(out, target_batch=64), heard, None)
    (told,) = heard.notes
    (line,) = [row for row in rows(out) if row["growth"]]
    assert line["growth"] == told
    assert line["step"] <= 16
    assert "memory grows by 129 KiB a step" in told
    assert "losses.append(loss)" in told
    said = int(re.findall(r"full at about step (\d+)", told)[0])
    assert loop.batches_seen + 1 == pytest.approx(said, rel=0.05)
    assert any(note.startswith("memory grew by 129 KiB a step, from ") for note in caught.value.__notes__)
