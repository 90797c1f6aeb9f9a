"""Runs on disk that end early: out of memory, values that are not finite, state that cannot be kept."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autobatch import DoesNotFitError, InputError, NonFiniteError, RestartSmallerError
from autobatch.device.cpu import CpuDevice, SimulatedDevice
from autobatch.device.profiles import load_profile
from autobatch.training.checkpoint import load_newest
from tests.support.faults import Fault, Watching, plain
from tests.support.runs import HINT, STEPS, ActingAfter, open_loop, resume, rows, saved_steps, settings, train
from tests.support.training import (
    HOST,
    Augmented,
    fingerprint,
    make_loop,
    make_workload,
    mean_loss,
    network,
    points,
)

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
DRIVER = RuntimeError("CUDA error: out of memory")


@pytest.mark.parametrize(
    ("error", "micro_batch", "after", "code", "then"),
    [(FULL, 1, 3, 3, 1), (DRIVER, 4, 3, 77, 2), (DRIVER, 4, 0, 77, 2)],
)
def test_a_run_that_ends_out_of_memory_before_the_optimizer_step_writes_the_state_before_the_batch(
    error: Exception, micro_batch: int, after: int, code: int, then: int, tmp_path: Path
) -> None:
    workload = plain(train_data=Augmented(*points().columns))
    options = {"target_batch": 8, "micro_batch": micro_batch}
    fault = Fault(60, error=error)
    loop = open_loop(workload, **options, meter=Watching(fault))
    fault.armed = after == 0
    with fault, pytest.raises((DoesNotFitError, RestartSmallerError)) as caught:
        train(loop, settings(tmp_path), ActingAfter(after, lambda: setattr(fault, "armed", True)))
    assert fault.phases[60] in ("forward", "backward")
    assert caught.value.exit_code == code
    assert saved_steps(tmp_path) == [after]
    assert "resume" in caught.value.__notes__[-1]
    assert (tmp_path / "oom.json").exists() == (code == 77)
    loop, done = resume(tmp_path, workload, **options)
    assert (done.optimizer_steps, done.micro_batch) == (STEPS, then)
    assert not (tmp_path / "oom.json").exists()
    straight = open_loop(workload, target_batch=8, micro_batch=micro_batch if after else then)
    for record in straight.run():
        if record.step == after:
            straight.micro_batch = then
    assert fingerprint(loop.train_state.model) == fingerprint(straight.train_state.model)


class Table(torch.nn.Linear):
    """Model that changes a buffer which is too large to be copied for every batch."""

    def __init__(self) -> None:
        super().__init__(5, 3, dtype=torch.float64)
        self.register_buffer("table", torch.zeros(2**19))

    def forward(self, inputs):
        self.table.add_(1)
        return super().forward(inputs)


@pytest.mark.parametrize("where", ["a large buffer", "moved part of the weights"])
def test_a_state_that_is_not_that_between_two_steps_is_not_written(where: str, tmp_path: Path) -> None:
    fault = Fault()
    fields = {"model": Table} if "buffer" in where else {}
    loop = open_loop(plain(**fields), target_batch=8, micro_batch=4, meter=Watching(fault))
    train_state = loop.train_state
    if fields:
        train_state.model.register_forward_pre_hook(lambda *_: fault.at.add(fault.count + 1))
    else:
        train_state.optimizers[0].register_step_pre_hook(lambda *_: fault.at.add(fault.count + 5))
    fault.armed = True
    with fault, pytest.raises(RestartSmallerError, match=where) as caught:
        train(loop, settings(tmp_path))
    assert saved_steps(tmp_path) == []
    assert "start again with --max-micro-batch 2" in caught.value.__notes__[0]


def test_a_validation_out_of_memory_leaves_a_checkpoint_of_its_step(tmp_path: Path) -> None:
    def loss(model, batch):
        if not model.training and fault.armed:
            raise FULL.with_traceback(None)
        return mean_loss(model, batch)

    fault = Fault()
    loop = open_loop(make_workload(loss=loss, validation_data=points(3)))
    listener = ActingAfter(1, lambda: setattr(fault, "armed", True))
    with pytest.raises(DoesNotFitError, match="in validation"):
        train(loop, settings(tmp_path, validate_every=2), listener)
    assert saved_steps(tmp_path) == [2]
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]


class Odd:
    pass


class OddTensor(Tensor):
    pass


@pytest.mark.parametrize("make", [Odd, lambda: len, lambda: torch.ones(2).as_subclass(OddTensor)])
def test_state_that_is_read_by_executing_code_is_refused_before_the_first_step(
    make: Any, tmp_path: Path
) -> None:
    class Keeping(torch.optim.lr_scheduler.StepLR):
        def state_dict(self):
            return {**super().state_dict(), "odd": [(make(),)]}

    loop = open_loop(make_workload(schedule=lambda optimizer, steps: Keeping(optimizer, 1)))
    with pytest.raises(InputError, match=r"schedules cannot be kept .*(test_run\.Odd|builtins\.len)"):
        train(loop, settings(tmp_path))
    assert loop.batches_seen == 0


class Lost(CpuDevice):
    """A device that no longer answers. Freeing its cache does not show it."""

    def synchronize(self) -> None:
        raise RuntimeError("lost")


@pytest.mark.parametrize(("error", "raised"), [(FULL, RuntimeError), (DRIVER, RestartSmallerError)])
def test_a_lost_device_ends_the_run_and_may_not_answer_after_a_fatal_error(error, raised) -> None:
    fault, device = Fault(60, error=error), Lost(HOST, "1GiB")
    loop = open_loop(plain(), target_batch=8, micro_batch=4, meter=Watching(fault), device=device)
    fault.armed = True
    with fault, pytest.raises(raised):
        next(loop.run())
    assert not loop.can_be_saved


@pytest.mark.parametrize(("left", "expected"), [('{"micro_batch": 2}', 2), ("broken", 3)])
def test_a_resumed_run_uses_the_smaller_micro_batch_of_one_that_ran_out_of_memory(
    left: str, expected: int, tmp_path: Path
) -> None:
    with pytest.raises(KeyError):
        train(open_loop(), settings(tmp_path, checkpoint_every=2), ActingAfter(3, {}.popitem))
    (tmp_path / "oom.json").write_text(left)
    _, done = resume(tmp_path)
    assert done.micro_batch == expected
    assert [row["micro_batch"] for row in rows(tmp_path)] == [3, 3, *[expected] * 4]
    assert not (tmp_path / "oom.json").exists()


def test_a_list_of_losses_is_named_where_it_has_filled_a_simulated_gpu(tmp_path: Path) -> None:
    kept = list[Any]()

    def loss(model: Any, batch: Any) -> Tensor:
        kept.append(batch[0].new_zeros(2**13))
        return mean_loss(model, batch)

    gpu = SimulatedDevice(load_profile("rtx-4090"), memory_budget="12MiB")
    with gpu.session(is_probe=False) as meter:
        loop = make_loop(make_workload(loss=loss), steps=99, device=gpu, meter=meter)
        with pytest.raises((DoesNotFitError, RestartSmallerError)) as caught:
            train(loop, settings(tmp_path))
    found = re.search(r"held between steps: ([\d.]+) MiB after step 16, ([\d.]+) MiB now", str(caught.value))
    assert found is not None, caught.value
    early, late = map(float, found.groups())
    assert early + 3 < late <= 12


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_non_finite_loss_ends_the_run_before_the_step_names_its_samples_and_is_not_saved(
    precision: str, tmp_path: Path
) -> None:
    data = points(24, dtype=torch.float32)
    workload = make_workload(model=lambda: network(torch.float32), train_data=data)
    loop = make_loop(workload, target_batch=6, micro_batch=4, steps=4, precision=precision)
    ids = list(loop.sampler.batches())[2].ids
    data.columns[0][ids[4], 0] = math.nan
    with pytest.raises(NonFiniteError, match=r"loss \(nan\) of step 3 ") as caught:
        train(loop, settings(tmp_path, checkpoint_every=2))
    assert str(ids) in str(caught.value)
    assert HINT in caught.value.__notes__[0]
    assert loop.batches_seen == loop.steps_applied == 2
    assert saved_steps(tmp_path) == [2]
    saved = load_newest(tmp_path / "checkpoints").state["model"]
    assert all(torch.equal(saved[name], value) for name, value in loop.train_state.model.state_dict().items())
