"""Files of a run on disk, the times they are written, and the micro-batch that a run starts with."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from autobatch.core.errors import InputError, RestartSmallerError
from autobatch.core.progress import Progress
from autobatch.training.checkpoint import list_checkpoints
from autobatch.training.run import train
from tests.support.faults import Fault, Watching, plain
from tests.support.runs import STEPS, ActingAfter, open_loop, resume, rows, saved_steps, settings
from tests.support.training import make_workload


def test_a_run_writes_its_metrics_its_checkpoint_and_its_weights(tmp_path: Path) -> None:
    loop = open_loop()
    done = train(loop, settings(tmp_path, checkpoint_every=2, keep_last=2), Progress(), None)
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, STEPS + 1))
    assert [p.name for p in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000004", "step-00000006"]
    assert done.checkpoint == str(tmp_path / "checkpoints" / "step-00000006")
    assert (done.optimizer_steps, done.samples, done.resumed_from) == (STEPS, 42, None)
    assert (done.first_loss, done.final_loss) == (rows(tmp_path)[0]["loss"], rows(tmp_path)[-1]["loss"])
    stored = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(stored[k], v) for k, v in loop.train_state.model.state_dict().items())


def test_out_of_memory_before_the_first_checkpoint_names_the_micro_batch_to_start_with(
    tmp_path: Path,
) -> None:
    fault = Fault()
    loop = open_loop(plain(), target_batch=8, micro_batch=4, meter=Watching(fault))
    loop.train_state.optimizers[0].register_step_pre_hook(lambda *_: fault.at.add(fault.count + 5))
    fault.armed = True
    with fault, pytest.raises(RestartSmallerError) as caught:
        train(loop, settings(tmp_path), Progress(), None)
    assert "start again with --max-micro-batch 2" in caught.value.__notes__[0]


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


def test_state_that_no_checkpoint_can_hold_is_refused_before_the_first_step(tmp_path: Path) -> None:
    class Odd(torch.optim.lr_scheduler.StepLR):
        def state_dict(self):
            return {**super().state_dict(), "odd": object()}

    loop = open_loop(make_workload(schedule=lambda optimizer, steps: Odd(optimizer, 1)))
    with pytest.raises(InputError, match="schedules cannot be kept in a checkpoint"):
        train(loop, settings(tmp_path), Progress(), None)
    assert loop.batches_seen == 0


def test_a_new_run_ignores_the_smaller_micro_batch_of_an_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "oom.json").write_text('{"micro_batch": 1}')
    assert train(open_loop(), settings(tmp_path), Progress(), None).micro_batch == 3


def test_checkpoints_are_written_by_the_clock(tmp_path: Path) -> None:
    loop = open_loop()
    ticks = count(step=10.0)
    loop.clock = lambda: next(ticks)
    train(loop, settings(tmp_path, checkpoint_minutes=1.0, keep_last=STEPS), Progress(), None)
    steps = saved_steps(tmp_path)
    assert steps[-1] == STEPS
    assert 1 < len(steps) < STEPS, "some steps are under a minute after the last checkpoint"
