"""Steps that end a run: samples that are not finite, what was held, and the next start."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from autobatch import DoesNotFitError, NonFiniteError, Progress, RestartSmallerError
from autobatch.device.cpu import CpuDevice, SimulatedDevice
from autobatch.device.profiles import load_profile
from autobatch.training.run import train
from tests.support.faults import Fault, Watching, plain
from tests.support.runs import ActingAfter, open_loop, resume, rows, settings
from tests.support.training import (
    Rows,
    make_loop,
    make_workload,
    network,
    points,
    weights,
)


class Lost(CpuDevice):
    """A device that no longer answers. Freeing its cache does not show it."""

    def synchronize(self) -> None:
        raise RuntimeError("lost")


def test_a_lost_device_ends_the_run_and_may_not_answer_after_a_fatal_error() -> None:
    for error, raised in (
        (torch.OutOfMemoryError("CUDA out of memory."), RuntimeError),
        (RuntimeError("CUDA error: out of memory"), RestartSmallerError),
    ):
        fault = Fault(60, error=error)
        loop = open_loop(
            plain(), target_batch=8, micro_batch=4, meter=Watching(fault), device=Lost(memory_budget="1GiB")
        )
        fault.armed = True
        with fault, pytest.raises(raised):
            next(loop.run())
        assert not loop.can_be_saved


@pytest.mark.parametrize(
    ("left", "expected"), [('{"micro_batch": 2}', 2), ("broken", 3), ('{"micro_batch": "2"}', 3)]
)
def test_a_resumed_run_uses_the_smaller_micro_batch_of_one_that_ran_out_of_memory(
    left: str, expected: int, tmp_path: Path
) -> None:
    with pytest.raises(KeyError):
        train(open_loop(), settings(tmp_path, checkpoint_every=2), ActingAfter(3, {}.popitem), None)
    (tmp_path / "oom.json").write_text(left)
    _, done = resume(tmp_path)
    assert done.micro_batch == expected
    assert [row["micro_batch"] for row in rows(tmp_path)] == [3, 3, *[expected] * 4]
    assert not (tmp_path / "oom.json").exists()


def test_a_list_of_losses_is_named_where_it_has_filled_a_simulated_gpu(tmp_path: Path) -> None:
    kept = list[Any]()

    def loss(model: Any, batch: Any) -> Tensor:
        kept.append(model[0](batch[0]))
        return cross_entropy(model(batch[0]), batch[1])

    workload = make_workload(
        model=lambda: nn.Sequential(nn.Linear(5, 512), nn.ReLU(), nn.Linear(512, 3)),
        train_data=points(64, dtype=torch.float32),
        loss=loss,
    )
    gpu = SimulatedDevice(load_profile("rtx-4090"), memory_budget="8MiB")
    with gpu.training() as meter:
        loop = make_loop(workload, target_batch=64, steps=400, device=gpu, meter=meter)
        with pytest.raises((DoesNotFitError, RestartSmallerError)) as caught:
            train(loop, settings(tmp_path / "run", target_batch=64), Progress(), None)
    found = re.search(r"held between steps: ([\d.]+) MiB after step 16, ([\d.]+) MiB now", str(caught.value))
    assert found is not None, caught.value
    early, late = map(float, found.groups())
    assert early <= 3 < 5 <= late <= 8


# losses that are not finite


def spoiled(samples: dict[int, float], dtype=torch.float32) -> Rows:
    data = points(24, dtype=dtype)
    for index, value in samples.items():
        data.columns[0][index, 0] = value
    return data


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_non_finite_loss_stops_the_run_before_the_step_and_names_its_samples(value, precision) -> None:
    workload = make_workload(model=lambda: network(torch.float32))
    ids = list(make_loop(workload, target_batch=6, steps=4).sampler.batches())[2].ids
    data = spoiled({ids[4]: value})
    workload = make_workload(model=lambda: nn.Sequential(nn.Linear(5, 3)), train_data=data)
    loop = make_loop(workload, target_batch=6, micro_batch=4, steps=4, precision=precision)
    run = loop.run()
    next(run)
    next(run)
    before = weights(loop.train_state.model)
    random_state = torch.get_rng_state()
    with pytest.raises(NonFiniteError, match=r"loss \(nan\) of step 3 ") as caught:
        next(run)
    assert str(ids) in str(caught.value)
    assert torch.equal(weights(loop.train_state.model), before)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert loop.batches_seen == loop.steps_applied == 2
