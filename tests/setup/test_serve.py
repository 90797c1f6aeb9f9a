"""The child's side: what it answers when the GPU answers nothing any more."""

from __future__ import annotations

from pathlib import Path

import pytest

from autobatch.core.errors import UserCodeError
from autobatch.core.options import Options
from autobatch.search.questions import run_attempt
from autobatch.setup.child import ChildProcess
from tests.support.commandline import SMALL

pytestmark = pytest.mark.usefixtures("warm_children")
LOSES_THE_GPU = """
from autobatch.device.cpu import CpuDevice
def losing(model, batch):
    if len(batch[0]) == 3:
        def lost(self):
            raise RuntimeError("CUDA error: device-side assert triggered")
        CpuDevice.synchronize = lost
        lost(None)
    return loss(model, batch)
def workload():
    return small(loss=losing)
"""


def test_a_child_whose_gpu_is_lost_tells_why_and_another_answers_the_next_question(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(f"{SMALL}\n{LOSES_THE_GPU}\n")
    settings = Options().with_values(device="cpu", memory_budget="64MiB")
    with ChildProcess(f"{file}:workload", settings) as process:
        first = process._process.pid
        with pytest.raises(UserCodeError, match="device-side assert"):
            run_attempt(process, 3)
        assert process._process.pid == first
        assert run_attempt(process, 2).attempt.fits
        assert process._process.pid != first
