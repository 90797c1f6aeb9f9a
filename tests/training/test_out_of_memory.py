"""A batch that ran out of memory is undone; the errors name the cures; the next start is smaller."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from autobatch.core.errors import RestartSmallerError
from autobatch.core.progress import Progress
from autobatch.device.cpu import CpuDevice
from autobatch.distributed.engine import OutOfMemory
from autobatch.training.out_of_memory import (
    available_host_memory,
    error_before_step,
    error_in_step,
    undo_batch,
)
from autobatch.training.run import train
from autobatch.workload.rng import capture_random_state
from tests.support.faults import Fault, Watching, plain
from tests.support.runs import ActingAfter, open_loop, resume, rows, settings
from tests.support.steps import train_state_of
from tests.support.training import INFO_NCE, make_loop, make_workload


class Lost(CpuDevice):
    """A device that no longer answers. Freeing its cache does not show it."""

    def synchronize(self) -> None:
        raise RuntimeError("lost")


def test_gradients_buffers_and_draws_are_those_of_the_start() -> None:
    norm = nn.BatchNorm1d(5, dtype=torch.float64)
    state = train_state_of(make_workload(model=lambda: nn.Sequential(norm, nn.Linear(5, 3).double())))
    before = capture_random_state()
    drawn = torch.rand(3)
    state.buffers.take()
    state.model(torch.randn(4, 5).double()).sum().backward()
    assert norm.num_batches_tracked == 1
    assert undo_batch(state, CpuDevice(memory_budget="1GiB"), before, is_fatal=False)
    assert norm.num_batches_tracked == 0
    assert all(parameter.grad is None for parameter in state.model.parameters())
    assert torch.equal(torch.rand(3), drawn)


def test_a_lost_device_is_an_error_unless_it_was_fatal_already() -> None:
    state = train_state_of(make_workload())
    before, device = capture_random_state(), Lost(memory_budget="1GiB")
    assert not undo_batch(state, device, before, is_fatal=True)
    with pytest.raises(RuntimeError, match="lost"):
        undo_batch(state, device, before, is_fatal=False)


def test_the_graphs_of_a_batch_that_ran_out_of_memory_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    resets: list[str] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append("reset"))
    state = train_state_of(make_workload())
    for has_graphs in (False, True):
        state.gradients.are_overwritten = has_graphs
        assert undo_batch(state, CpuDevice(memory_budget="1GiB"), capture_random_state(), is_fatal=False)
    assert resets == ["reset"]


PLAIN = make_loop(make_workload()).train_state
FULL = OutOfMemory("full.", is_fatal=False)
BROKEN = OutOfMemory("broken", is_fatal=True)


@pytest.mark.parametrize(
    ("micro_batch", "oom", "is_intact", "code", "message"),
    [
        (2, BROKEN, True, 77, "in step 3 at a micro-batch of 2, in the driver.*: broken"),
        (2, FULL, False, 77, "micro-batch of 2: full.*a large buffer"),
        (1, FULL, True, 3, "micro-batch of 1: full; what would help: a larger --memory-budget, --precision"),
        (1, BROKEN, False, 3, "micro-batch of 1: broken; what would help"),
    ],
)
def test_a_batch_that_cannot_run_again_ends_the_run(micro_batch, oom, is_intact, code, message) -> None:
    error = error_before_step(PLAIN, 3, oom._replace(size=micro_batch, is_intact=is_intact))
    assert error is not None
    assert error.exit_code == code
    with pytest.raises(type(error), match=message):
        raise error


def test_a_batch_that_is_undone_can_run_again() -> None:
    assert error_before_step(PLAIN, 3, FULL._replace(size=2)) is None


def test_only_remedies_that_apply_are_named() -> None:
    whole = make_loop(make_workload(loss=INFO_NCE), ema=0.9).train_state
    for train_state, expected in ((PLAIN, False), (whole, True)):
        before = str(error_before_step(train_state, 1, FULL._replace(size=1)))
        assert ("a smaller --target-batch" in before) == expected
        assert ("no --ema" in str(error_in_step(train_state, 1, 1, "full."))) == expected


@pytest.mark.parametrize(("micro_batch", "code"), [(4, 77), (2, 77), (1, 3)])
def test_a_failure_inside_the_optimizer_step_is_restarted_smaller_down_to_1(micro_batch, code) -> None:
    error = error_in_step(PLAIN, 5, micro_batch, "full.")
    assert error.exit_code == code
    assert f"step 5 at a micro-batch of {micro_batch}, inside the optimizer step" in str(error)
    assert ("what would help: a larger --memory-budget, a fused optimizer" in str(error)) == (code == 3)


def test_the_available_memory_is_unknown_if_it_cannot_be_read_for_lack_of_memory(monkeypatch) -> None:
    assert available_host_memory().endswith("iB")

    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("autobatch.training.out_of_memory.host_memory", fail)
    assert available_host_memory() == "unknown"


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
    ("left", "expected"), [('{"limits": [2]}', 2), ("broken", 3), ('{"limits": ["2"]}', 3)]
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


def test_a_new_run_ignores_the_smaller_micro_batch_of_an_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "oom.json").write_text('{"limits": [1]}')
    assert train(open_loop(), settings(tmp_path), Progress(), None).micro_batch == 3
