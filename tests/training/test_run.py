"""Files of a run on disk, and what is written when memory runs out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autobatch import DoesNotFitError, InputError, Progress, RestartSmallerError
from autobatch.training.run import train
from tests.support.faults import Fault, Noisy, Watching, plain
from tests.support.runs import STEPS, ActingAfter, open_loop, resume, rows, saved_steps, settings
from tests.support.training import (
    fingerprint,
    make_workload,
    mean_loss,
    points,
)

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
DRIVER = RuntimeError("CUDA error: out of memory")


class Drawing(torch.nn.Module):
    """Model with dropout and running statistics: all the state that a forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 3))
        self.register_buffer("mean", torch.zeros(3))
        self.double()

    def forward(self, inputs):
        found = self.body(inputs)
        self.mean.lerp_(found.detach().mean(0), 0.1)
        return found - self.mean


def drawing():
    return plain(model=Drawing, train_data=Noisy(*points().columns))


def run_until_oom(out: Path, error: Exception, *, micro_batch: int, after: int = 3):
    """Train until an operator of the step after some raises; return the error."""
    fault = Fault(60, error=error)
    loop = open_loop(drawing(), target_batch=8, micro_batch=micro_batch, meter=Watching(fault))
    fault.armed = after == 0
    with fault, pytest.raises((DoesNotFitError, RestartSmallerError)) as caught:
        train(loop, settings(out), ActingAfter(after, lambda: setattr(fault, "armed", True)), None)
    assert fault.phases[60] in ("forward", "loss", "backward")
    return caught.value


@pytest.mark.parametrize(
    ("error", "micro_batch", "after", "code", "then"),
    [(FULL, 1, 3, 3, 1), (DRIVER, 1, 3, 3, 1), (DRIVER, 4, 3, 77, 2), (DRIVER, 4, 0, 77, 2)],
)
def test_a_run_that_ends_out_of_memory_before_the_optimizer_step_writes_the_state_before_the_batch(
    error: Exception, micro_batch: int, after: int, code: int, then: int, tmp_path: Path
) -> None:
    caught = run_until_oom(tmp_path, error, micro_batch=micro_batch, after=after)
    assert caught.exit_code == code
    assert saved_steps(tmp_path) == [after]
    assert "resume" in caught.__notes__[-1]
    assert (tmp_path / "oom.json").exists() == (code == 77)
    loop, done = resume(tmp_path, drawing(), target_batch=8, micro_batch=micro_batch)
    assert (done.optimizer_steps, done.micro_batch) == (STEPS, then)
    straight = open_loop(drawing(), target_batch=8, micro_batch=micro_batch if after else then)
    for record in straight.run():
        if record.step == after:
            straight.micro_batch = then
    assert fingerprint(loop.train_state.model) == fingerprint(straight.train_state.model)


class Table(torch.nn.Module):
    """Model that changes a buffer which is too large to be copied for every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(5, 3, dtype=torch.float64)
        self.register_buffer("table", torch.zeros(2**19, dtype=torch.float64))

    def forward(self, inputs):
        self.table.add_(1)
        return self.body(inputs)


@pytest.mark.parametrize("where", ["a large buffer", "moved part of the weights"])
def test_a_state_that_is_not_that_between_two_steps_is_not_written(where: str, tmp_path: Path) -> None:
    fault = Fault()
    fields = {"model": Table} if "buffer" in where else {}
    loop = open_loop(plain(**fields), target_batch=8, micro_batch=4, meter=Watching(fault))
    train_state = loop.train_state
    if fields:
        train_state.model.body.register_forward_pre_hook(lambda *_: fault.at.add(fault.count + 1))
    else:
        train_state.optimizers[0].register_step_pre_hook(lambda *_: fault.at.add(fault.count + 5))
    fault.armed = True
    with fault, pytest.raises(RestartSmallerError, match=where) as caught:
        train(loop, settings(tmp_path), Progress(), None)
    assert saved_steps(tmp_path) == []
    assert "start again with --max-micro-batch 2" in caught.value.__notes__[0]


def test_a_validation_out_of_memory_leaves_a_checkpoint_of_its_step(tmp_path: Path) -> None:
    def loss(model, batch):
        if not model.training and fault.armed:
            raise FULL.with_traceback(None)
        return mean_loss(model, batch)

    fault = Fault()
    workload = make_workload(loss=loss, validation_data=points(3))
    with pytest.raises(DoesNotFitError, match="in validation"):
        train(
            open_loop(workload),
            settings(tmp_path, validate_every=2),
            ActingAfter(1, lambda: setattr(fault, "armed", True)),
            None,
        )
    assert saved_steps(tmp_path) == [2]
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]


def test_state_that_no_checkpoint_can_hold_is_refused_before_the_first_step(tmp_path: Path) -> None:
    class Odd(torch.optim.lr_scheduler.StepLR):
        def state_dict(self):
            return {**super().state_dict(), "odd": object()}

    loop = open_loop(make_workload(schedule=lambda optimizer, steps: Odd(optimizer, 1)))
    with pytest.raises(InputError, match="schedules cannot be kept in a checkpoint"):
        train(loop, settings(tmp_path), Progress(), None)
    assert loop.batches_seen == 0
