"""Log of a rank that does not print: OUT/ranks/rank-N.log."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from autobatch.core.progress import Progress

if TYPE_CHECKING:
    from autobatch.core.records.device import DeviceRecord
    from autobatch.core.records.probe import Attempt
    from autobatch.core.records.training import StepRecord

FOLDER = "ranks"


class RankLog(Progress):
    """Listener that writes what a rank does to a file, as soon as the folder of the run is known.

    Args:
        rank: the rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._waiting: list[str] = []
        self._path: Path | None = None

    def enter(self, folder: Path) -> None:
        """Set the folder of the run, and write what has happened so far."""
        self._path = folder / FOLDER / f"rank-{self._rank}.log"
        lines, self._waiting = self._waiting, []
        for line in lines:
            self.note(line)

    def note(self, text: str) -> None:
        """Write a line. A log that cannot be written must not end the run."""
        if self._path is None:
            self._waiting.append(text)
            return
        try:
            self._path.parent.mkdir(exist_ok=True)
            with self._path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{text}\n")
        except OSError:
            return

    def opened(self, device: DeviceRecord) -> None:
        """Write the device and its budget."""
        self.note(f"device {device.name}, budget {device.budget_bytes} bytes ({device.budget_source})")

    def attempted(self, attempt: Attempt) -> None:
        """Write a micro-batch that ran."""
        self.note(f"a micro-batch of {attempt.micro_batch} {'fits' if attempt.fits else attempt.reason}")

    def stepped(self, step: StepRecord, of: int) -> None:
        """Write a recovery, and the last step."""
        if step.recovered is not None or step.step == of:
            self.note(f"step {step.step} of {of}, {step.recovered or 'done'}")
