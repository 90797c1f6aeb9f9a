"""A resumed run is bit-exact from any step, for every kind of state."""

from __future__ import annotations

import io
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from autobatch import DoesNotFitError, InputError
from autobatch.training.checkpoint import load_newest, save_checkpoint
from autobatch.training.resume import capture_loop, restore_loop
from tests.support.faults import Fault
from tests.support.kinds import RUNS, adamw
from tests.support.training import apart, fingerprint, make_loop, make_workload, weights

STEPS = 8


def open_loop(kind: str, **changes):
    workload, options = RUNS[kind]()
    return make_loop(workload, target_batch=7, micro_batch=3, steps=STEPS, **{**options, **changes})


def all_of(loop) -> str:
    average = loop.train_state.average
    return fingerprint(loop.train_state.model, *(average.tensors() if average is not None else []))


@pytest.mark.parametrize("kind", RUNS)
def test_a_resume_at_any_step_is_bit_exact(kind: str, tmp_path: Path) -> None:
    straight = open_loop(kind)
    for record in straight.run():
        save_checkpoint(tmp_path / str(record.step), step=record.step, state=capture_loop(straight), facts={})
    expected = all_of(straight)
    if kind.startswith("overflowing"):
        assert straight.steps_applied < STEPS
    for step in range(1, STEPS + 1):
        loop = open_loop(kind, seed=0)
        # Random numbers drawn before the resume (for a plan, for another model) must not matter.
        torch.manual_seed(step)
        np.random.seed(step)
        random.seed(step)
        loaded = load_newest(tmp_path / str(step))
        restore_loop(loop, loaded.state, same_hardware=True)
        assert len(list(loop.run())) == STEPS - step
        assert all_of(loop) == expected, f"resumed at step {step}"
        assert loop.steps_applied == straight.steps_applied


@pytest.mark.parametrize(
    "part", ["optimizers", "schedules", "torch", "numpy", "python", "buffers", "scaler", "average"]
)
def test_a_resume_without_any_part_of_the_state_differs(part: str) -> None:
    """So the comparison above detects a part that is missing."""
    kinds = {"schedules": "one cycle", "scaler": "overflowing", "average": "augmented, averaged"}
    kind = kinds.get(part, "augmented")
    straight = open_loop(kind)
    run = straight.run()
    for _ in range(5):
        next(run)
    state = torch.load(_saved(capture_loop(straight)), weights_only=True)
    list(run)
    loop = open_loop(kind, seed=0)
    fresh = capture_loop(open_loop(kind, seed=1))
    if part in state["random"][0]:
        state["random"][0][part] = fresh["random"][0][part]
    elif part == "scaler":
        state[part]["scale"] = 2.0**24
    else:
        state[part] = fresh[part]
    restore_loop(loop, state, same_hardware=True)
    list(loop.run())
    assert all_of(loop) != all_of(straight)


def _saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("micro_batch", [1, 5, 7])
def test_on_other_hardware_the_batches_are_the_same_and_weights_differ_by_rounding(micro_batch: int) -> None:
    workload = make_workload(optimizer=adamw)
    options = {"target_batch": 7, "steps": STEPS}
    straight = make_loop(workload, micro_batch=3, **options)
    run = straight.run()
    for _ in range(4):
        next(run)
    state = torch.load(_saved(capture_loop(straight)), weights_only=True)
    list(run)
    loop = make_loop(workload, micro_batch=micro_batch, **options)
    restore_loop(loop, state, same_hardware=False)
    assert [b.ids for b in loop.sampler.batches(4)] == [b.ids for b in straight.sampler.batches(4)]
    list(loop.run())
    assert loop.micro_batch == micro_batch
    assert apart(weights(loop.train_state.model), weights(straight.train_state.model)) <= 1e-12


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (None, 0.9, "--ema 0.9 does not match the resumed run, which used no --ema"),
        (0.9, None, "no --ema does not match .* which used --ema 0.9"),
        (0.9, 0.99, "--ema 0.99 does not match .* which used --ema 0.9: give the same"),
    ],
)
def test_another_average_of_the_weights_is_refused(before, after, message: str) -> None:
    state = capture_loop(make_loop(make_workload(), ema=before))
    with pytest.raises(InputError, match=message):
        restore_loop(make_loop(make_workload(), ema=after), state, same_hardware=True)


def test_the_state_of_another_model_is_refused_in_one_line() -> None:
    state = capture_loop(open_loop("augmented"))
    with pytest.raises(InputError, match="with another model, optimizer or schedule") as caught:
        restore_loop(open_loop("ragged"), state, same_hardware=True)
    assert "\n" not in str(caught.value)
    assert "Error(s)" not in str(caught.value)


OUT_OF_MEMORY = {
    "device": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
    "host": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
}


@pytest.mark.parametrize(
    ("kind", "error"),
    [("augmented, averaged", "device"), ("overflowing", "host"), ("float32 state", "device")],
)
def test_memory_that_runs_out_at_any_tensor_operation_of_a_resume_is_no_other_model(kind, error) -> None:
    loop = open_loop(kind)
    next(loop.run())
    state = torch.load(_saved(capture_loop(loop)), weights_only=True)
    fresh = open_loop(kind)
    with Fault() as fault:
        fault.armed = True
        restore_loop(fresh, state, same_hardware=True)
    assert fault.count >= 5
    for operation in range(fault.count):
        fresh = open_loop(kind)
        with Fault(operation, error=OUT_OF_MEMORY[error]) as fault:
            fault.armed = True
            with pytest.raises(DoesNotFitError, match="not enough memory to resume: the state") as caught:
                restore_loop(fresh, state, same_hardware=True)
        assert caught.value.exit_code == 3
        assert re.search(r"takes [\d.]+ (KiB|B), and the memory budget is 1.00 GiB", str(caught.value))
        assert "\n" not in str(caught.value)


def test_any_error_of_a_users_schedule_is_refused_in_one_line() -> None:
    class Strict(torch.optim.lr_scheduler.StepLR):
        def load_state_dict(self, state):
            assert state is None, "first\nsecond"

    workload = make_workload(schedule=lambda optimizer, steps: Strict(optimizer, 1))
    with pytest.raises(InputError, match=r"\(AssertionError: first") as caught:
        restore_loop(make_loop(workload), capture_loop(make_loop(workload)), same_hardware=True)
    assert "\n" not in str(caught.value)
