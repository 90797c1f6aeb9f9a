"""A resumed run is the run that was not stopped, bit for bit, from every step on."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
)

from autobatch.errors import InputError
from autobatch.training.checkpoint import load_newest, save_checkpoint
from autobatch.training.resume import check_storable
from tests.training.helpers import (
    Rows,
    apart,
    fingerprint,
    language_model,
    make_loop,
    make_workload,
    network,
    points,
    token_loss,
    tokens,
    weights,
)
from tests.training.test_scaler import flagged
from tests.training.test_scaler import loss as overflowing_loss

STEPS = 8


class Augmented(Rows):
    """Draws from the generators of Python, NumPy and torch for every sample."""

    def __getitem__(self, index: int):
        inputs, labels = super().__getitem__(index)
        return inputs * random.uniform(0.5, 1.5) + float(np.random.normal()) + torch.randn(5), labels


class Everything(nn.Module):
    """Dropout, batch statistics, and an average that no state dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.Linear(8, 3))
        self.register_buffer("average", torch.zeros(3), persistent=False)

    def forward(self, inputs):
        out = self.body(inputs)
        self.average = 0.9 * self.average + 0.1 * out.detach().mean(0)
        return out + self.average


class Float32State(torch.optim.SGD):
    """Keeps float32 copies of 16-bit parameters as state, which torch rounds when it loads them."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("copy", parameter.detach().float().clone())
                state["copy"] -= group["lr"] * parameter.grad.float()
                parameter.data.copy_(state["copy"])


def adamw(params, lr):
    return torch.optim.AdamW(params, lr=0.01, amsgrad=True)


def augmented():
    data = Augmented(*points(dtype=torch.float32).columns)
    return make_workload(model=Everything, train_data=data, optimizer=adamw), {}


def scheduled(make):
    def build():
        return make_workload(
            model=Everything, train_data=points(dtype=torch.float32), optimizer=adamw, schedule=make
        ), {}

    return build


def ragged():
    return make_workload(
        model=lambda: language_model(torch.float32), train_data=tokens(), loss=token_loss, optimizer=adamw
    ), {}


def overflowing():
    """Overflows before, at and after most of the places to resume from."""
    workload = make_workload(
        model=lambda: network(torch.float32),
        train_data=flagged({3, 17}, samples=24),
        loss=overflowing_loss,
        optimizer=adamw,
        schedule=CosineAnnealingLR,
    )
    return workload, {"precision": "fp16"}


def float32_state():
    return make_workload(
        model=lambda: network(torch.bfloat16),
        train_data=Rows(points().columns[0].bfloat16(), points().columns[1]),
        optimizer=lambda params, lr: Float32State(params, lr=0.003),
    ), {}


def two_optimizers():
    def optimizers(params, lr):
        params = list(params)
        return torch.optim.SGD(params[:2], lr=lr, momentum=0.9), torch.optim.RMSprop(params[2:], lr=0.01)

    return make_workload(optimizer=optimizers, schedule=lambda o, steps: LinearLR(o, 1.0, 0.1, steps)), {}


RUNS = {
    "augmented": augmented,
    "one cycle": scheduled(lambda o, steps: OneCycleLR(o, 0.05, total_steps=steps + 1)),
    "sequential": scheduled(
        lambda o, steps: SequentialLR(o, [LinearLR(o, 0.1, 1.0, 3), CosineAnnealingLR(o, steps)], [3])
    ),
    "milestones": scheduled(lambda o, steps: MultiStepLR(o, [2, 5])),
    "numpy scalars": scheduled(lambda o, steps: LambdaLR(o, lambda step: np.cos(step / steps))),
    "ragged": ragged,
    "overflowing": overflowing,
    "float32 state": float32_state,
    "two optimizers": two_optimizers,
}


def open_loop(kind: str, **changes):
    workload, options = RUNS[kind]()
    return make_loop(workload, target_batch=7, micro_batch=3, steps=STEPS, **{**options, **changes})


@pytest.mark.parametrize("kind", RUNS)
def test_from_every_step_the_weights_are_the_same_bit_for_bit(kind: str, tmp_path: Path) -> None:
    straight = open_loop(kind)
    for record in straight.run():
        save_checkpoint(tmp_path / str(record.step), step=record.step, state=straight.state_dict(), facts={})
    expected = fingerprint(straight.trainee.model)
    if kind == "overflowing":
        assert straight.steps_applied < STEPS
    for step in range(1, STEPS + 1):
        loop = open_loop(kind, seed=0)
        # Whatever was drawn before the resume (a plan, another model) must not matter.
        torch.manual_seed(step)
        np.random.seed(step)
        random.seed(step)
        loaded = load_newest(tmp_path / str(step))
        loop.load_state_dict(loaded.state, same_hardware=True)
        assert len(list(loop.run())) == STEPS - step
        assert fingerprint(loop.trainee.model) == expected, f"resumed at step {step}"
        assert loop.steps_applied == straight.steps_applied


@pytest.mark.parametrize("part", ["optimizers", "schedules", "torch", "numpy", "python", "buffers", "scaler"])
def test_each_part_of_the_state_is_needed(part: str) -> None:
    """Without any one part the weights differ: the comparison above has teeth."""
    kind = {"schedules": "one cycle", "scaler": "overflowing"}.get(part, "augmented")
    straight = open_loop(kind)
    run = straight.run()
    for _ in range(5):
        next(run)
    state = torch.load(_saved(straight.state_dict()), weights_only=True)
    list(run)
    loop = open_loop(kind, seed=0)
    fresh = open_loop(kind, seed=1).state_dict()
    if part in state["random"]:
        state["random"][part] = fresh["random"][part]
    elif part == "scaler":
        state[part]["scale"] = 2.0**24
    else:
        state[part] = fresh[part]
    loop.load_state_dict(state, same_hardware=True)
    list(loop.run())
    assert fingerprint(loop.trainee.model) != fingerprint(straight.trainee.model)


def _saved(state):
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("micro_batch", [1, 5, 7])
def test_on_other_hardware_the_windows_stay_and_sums_differ_by_rounding(micro_batch: int) -> None:
    workload = make_workload(optimizer=adamw)
    options = {"target_batch": 7, "steps": STEPS}
    straight = make_loop(workload, micro_batch=3, **options)
    run = straight.run()
    for _ in range(4):
        next(run)
    state = torch.load(_saved(straight.state_dict()), weights_only=True)
    list(run)
    loop = make_loop(workload, micro_batch=micro_batch, **options)
    loop.load_state_dict(state, same_hardware=False)
    assert [w.ids for w in loop.course.windows(4)] == [w.ids for w in straight.course.windows(4)]
    list(loop.run())
    assert loop.micro_batch == micro_batch
    assert apart(weights(loop.trainee.model), weights(straight.trainee.model)) <= 1e-12


def test_a_smaller_micro_batch_after_a_recovery_is_kept() -> None:
    loop = open_loop("ragged")
    loop.micro_batch, loop.oom_recoveries = 2, 1
    other = open_loop("ragged")
    other.load_state_dict(loop.state_dict(), same_hardware=True)
    assert (other.micro_batch, other.oom_recoveries) == (2, 1)


def test_the_state_of_another_model_is_refused_in_one_line() -> None:
    state = open_loop("augmented").state_dict()
    with pytest.raises(InputError, match="of another model, optimizer or schedule") as caught:
        open_loop("ragged").load_state_dict(state, same_hardware=True)
    assert "\n" not in str(caught.value)


def test_state_that_no_checkpoint_can_hold_is_refused_before_training() -> None:
    class Secret:
        pass

    class Odd(torch.optim.lr_scheduler.StepLR):
        def state_dict(self):
            return {**super().state_dict(), "secret": Secret()}

    loop = make_loop(make_workload(schedule=lambda o, steps: Odd(o, 1)))
    with pytest.raises(InputError, match="schedules cannot be kept in a checkpoint"):
        check_storable(loop.state_dict())
