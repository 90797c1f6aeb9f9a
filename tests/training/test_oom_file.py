"""The micro-batch that a run leaves when memory runs out, and that the next start takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from autobatch.core.errors import RestartSmallerError
from autobatch.core.progress import Progress
from autobatch.training.run import train
from tests.support.faults import Fault, Watching, plain
from tests.support.runs import ActingAfter, open_loop, resume, rows, settings


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


def test_a_new_run_ignores_the_smaller_micro_batch_of_an_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "oom.json").write_text('{"micro_batch": 1}')
    assert train(open_loop(), settings(tmp_path), Progress(), None).micro_batch == 3
