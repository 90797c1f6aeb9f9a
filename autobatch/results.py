"""What a call returns, and the JSON that the command line prints of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from autobatch import __version__
from autobatch.records import (
    DeviceRecord,
    MemoryCurve,
    Plan,
    PredictedPoint,
    Probe,
    Record,
    Training,
    Tuning,
)

SCHEMA = 1


class Result(Record, frozen=True, kw_only=True):
    """The records of every part that ran; a part that did not run is ``None``."""

    device: DeviceRecord
    probe: Probe | None = None
    plan: Plan | None = None
    tuning: Tuning | None = None
    training: Training | None = None
    profile: Path | None = None
    """The file that remembers what fitted."""
    report: Path | None = None
    out: Path | None = None
    """The folder of the run."""
    title: str | None = None
    """The workload's name."""
    command: str | None = None
    """What repeats the run."""
    predicted: list[PredictedPoint] = []
    """Peaks around the answer as they were predicted; empty where an earlier answer was confirmed."""
    memory_curve: MemoryCurve | None = None
    """Where the memory goes over a step at the answer, likewise."""
    versions: dict[str, str] = {}
    created: str | None = None
    """When the run ended: ISO date and time, UTC."""
    checkpoints: list[int] = []
    """Windows after which a checkpoint was written, as far as they are kept."""
    model: Any = None
    """The trained ``torch.nn.Module``; not part of the JSON."""

    def to_json(self, *parts: str) -> dict[str, Any]:
        """The object of ``--json``.

        Args:
            parts: names of the parts to print; without any, all of them.
        """
        head: dict[str, Any] = {"schema": SCHEMA, "autobatch": __version__}
        names = parts or tuple(name for name in self.__struct_fields__ if name not in ("model",))
        values = {name: getattr(self, name) for name in names}
        return head | {
            name: str(value) if isinstance(value, Path) else msgspec.to_builtins(value)
            for name, value in values.items()
        }

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from autobatch.report.notebook import result_html

        return result_html(self)
