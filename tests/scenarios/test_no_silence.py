"""The demo in a terminal, as a user sees it: at every moment the screen says what happens."""

from __future__ import annotations

from pathlib import Path

import pytest

recording = pytest.importorskip("benchmarks.recording", reason="there is no terminal in memory")
ACTS = (
    "importing torch",
    "opening the workload",
    "running ",
    "checking that the loss can be split",
    "measuring the default",
    "trial 2 of 3",
    "trial 3 of 3",
    "training",
    "validating",
    "writing the report",
)
"""Acts of the demo that take more than a moment, in their order."""
BAR = "━╸╺"


@pytest.mark.program
def test_the_screen_names_each_act_in_order_from_the_first_output_to_the_result(tmp_path: Path) -> None:
    """No wall time: a live line stands at the end of the screen whenever something is written."""
    command, lines = "autobatch fit --target-batch 1024 --steps 6 --trials 3 --out run", list[str]()
    for screen in recording.screens(command, str(tmp_path), 80, rows=24):
        shown = [line.rstrip() for line in screen.display]
        lines.append(next((line for line in reversed(shown) if line), ""))
    live = [number for number, line in enumerate(lines) if line[:1] in BAR and line]
    # A chunk of output may end between what was printed and the line that is drawn again below it.
    assert len(live) > 0.8 * (live[-1] - live[0])
    told = iter(lines)
    for act in ACTS:
        assert any(act in line for line in told), f"{act} was not told, or out of order"
