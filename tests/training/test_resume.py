"""A resumed run is bit-exact from any step, for every kind of state; what rules that out is named."""

from __future__ import annotations

import copy
import errno
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autobatch import DoesNotFitError, InputError
from autobatch.training.checkpoint import Loaded, load_newest, save_checkpoint
from autobatch.training.resume import capture_loop, restore_loop
from tests.support.checkpoints import save
from tests.support.faults import Fault
from tests.support.kinds import RUNS, run_of
from tests.support.runs import fit
from tests.support.training import averages, fingerprint, make_loop, make_workload, points

STEPS = 8


def open_loop(kind: str, **changes):
    workload, options = run_of(kind)
    return make_loop(workload, target_batch=7, micro_batch=3, steps=STEPS, **{**options, **changes})


def all_of(loop) -> str:
    return fingerprint(loop.train_state.model, *averages(loop.train_state.average))


@pytest.mark.parametrize("kind", RUNS)
def test_a_resume_at_any_step_is_bit_exact(kind: str, tmp_path: Path) -> None:
    straight = open_loop(kind)
    for record in straight.run():
        folder, state = tmp_path / f"{record.step}/checkpoints", capture_loop(straight)
        save_checkpoint(folder, step=record.step, state=state, facts={})
    expected = all_of(straight)
    if kind.startswith("overflowing"):
        assert straight.steps_applied < STEPS
    for step in range(1, STEPS + 1):
        loop = open_loop(kind, seed=0)
        # Random numbers drawn before the resume (for a plan, for another model) must not matter.
        torch.manual_seed(step)
        np.random.seed(step)
        random.seed(step)
        loaded = load_newest(tmp_path / f"{step}/checkpoints")
        restore_loop(loop, loaded, same_hardware=True)
        assert len(list(loop.run())) == STEPS - step
        assert all_of(loop) == expected, f"resumed at step {step}"
        assert loop.steps_applied == straight.steps_applied


def test_memory_that_runs_out_at_any_tensor_operation_of_a_resume_is_no_other_model() -> None:
    kind = "augmented, averaged"
    loop = open_loop(kind)
    next(loop.run())
    resumed = Loaded(Path(), copy.deepcopy(capture_loop(loop)), {}, [])
    fresh = open_loop(kind)
    with Fault() as fault:
        fault.armed = True
        restore_loop(fresh, resumed, same_hardware=True)
    assert fault.count >= 5
    for operation in range(fault.count):
        fresh = open_loop(kind)
        with Fault(operation) as fault:
            fault.armed = True
            with pytest.raises(DoesNotFitError, match="the state of a checkpoint"):
                restore_loop(fresh, resumed, same_hardware=True)


def test_a_run_without_a_checkpoint_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--resume found no checkpoint in .*: start without --resume"):
        load_newest(tmp_path / "checkpoints")


@pytest.mark.parametrize("place", ["torch.load", "hashlib.file_digest"])
def test_memory_that_runs_out_while_a_checkpoint_is_read_does_not_make_it_invalid(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "checkpoints", 2)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(place, fail)
        with pytest.raises(DoesNotFitError, match="while a checkpoint, which is intact, was loaded"):
            load_newest(tmp_path / "checkpoints")
    loaded = load_newest(tmp_path / "checkpoints")
    assert (loaded.path, loaded.passed_over) == (path, [])


ASKED = {"target_batch": 8, "steps": 2, "memory_budget": "64MiB", "max_micro_batch": 4}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of two steps."""
    out = tmp_path_factory.mktemp("run")
    fit(make_workload(), out, **ASKED)
    return out


def resume(done: Path, folder: Path, **changes: Any) -> list[str]:
    """Resume a copy of a run with other fields of its workload, or other options; return what is said."""
    known = ("model", "schedule", "train_data", "sampler", "optimizer", "learning_rate")
    fields = {name: changes.pop(name) for name in known if name in changes}
    shutil.copytree(done, folder / "copy")
    return fit(make_workload(**fields), folder / "copy", resume=True, **{**ASKED, **changes})[1]


def decaying(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"target_batch": 16},
            "--target-batch 16 does not match the checkpoint .*step-00000002, which has 8",
        ),
        ({"seed": 7}, "--seed 7 does not match the checkpoint .*step-00000002, which has 0"),
        ({"train_data": points(23)}, "number of training samples 23 does not match .*, which has 24"),
        ({"train_data": points(seed=1)}, "of this run are not those of the checkpoint .*PYTHONHASHSEED=0"),
        ({"sampler": range(24)}, "order of the sampler .* does not match the checkpoint"),
        (
            {"steps": 1},
            "step-00000002 has 2 steps behind it, and the run is to have 1: ask for more --steps",
        ),
        ({"schedule": decaying, "steps": 9}, "number of optimizer steps of the schedule 9 does not match"),
        ({"model": lambda: nn.Linear(5, 3).double()}, "another model, optimizer or schedule"),
        (
            {"optimizer": lambda params, rate: torch.optim.Adagrad(params)},
            r"optimizer .*Adagrad finds no .*eps",
        ),
    ],
)
def test_another_batch_another_order_of_the_data_or_another_model_is_refused(
    done: Path, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        resume(done, tmp_path, **changes)
    assert "\n" not in str(caught.value)


def test_a_run_that_ended_in_a_short_batch_is_not_longer(tmp_path: Path) -> None:
    """The last batch of one epoch has 8 samples, and would have 16 in two."""
    asked = {**ASKED, "target_batch": 16, "steps": None}
    fit(make_workload(), tmp_path / "run", **asked, epochs=1)
    with pytest.raises(InputError, match=r"ended with a smaller batch.*\(24 samples so far, and 32\)"):
        resume(tmp_path / "run", tmp_path, **asked, epochs=2)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "on the same hardware"),
        ({"learning_rate": 0.2}, "on the same hardware"),
        ({"max_micro_batch": 3, "memory_budget": "32MiB"}, "another --max-micro-batch and another --mem"),
        ({"precision": "bf16"}, "another --precision: the batch"),
    ],
)
def test_what_rules_out_a_bit_exact_resume_is_named(
    done: Path, changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    notes = resume(done, tmp_path, **changes)
    assert expected in next(note for note in notes if note.startswith("resuming from"))
    assert "nothing is left to train: all 2 steps of the run are done" in notes
    assert any("0.1, counts, and not" in note for note in notes) == ("learning_rate" in changes)
