"""A child process that waits for its workload."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from autobatch.probing.open_process import open_process
from autobatch.probing.setup import SetupSettings
from autobatch.probing.spare import spare_child

SETTINGS = SetupSettings(device="cpu", memory_budget="1GiB")


def test_a_spare_child_serves_the_first_workload_and_a_new_one_the_next() -> None:
    with spare_child() as spare:
        with open_process(None, SETTINGS, isolated=True, spare=spare) as first:
            assert first._process.pid == spare.process.pid
            assert first.info.samples > 0
        assert not spare.process.is_alive()
        assert spare.is_taken


def test_a_child_that_nobody_takes_is_ended() -> None:
    with spare_child() as spare:
        log = Path(spare.log.name)
        assert log.exists()
    assert not spare.process.is_alive()
    assert not log.exists()


def test_the_parent_imports_no_torch_to_start_it() -> None:
    check = "import sys; import autobatch.probing.spare; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
