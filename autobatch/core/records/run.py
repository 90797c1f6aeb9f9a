"""The record of a whole run, from which the report is drawn."""

from __future__ import annotations

from autobatch.core.records.base import Record
from autobatch.core.records.device import DeviceRecord
from autobatch.core.records.plan import Plan
from autobatch.core.records.probe import Probe
from autobatch.core.records.training import StepRecord, Training
from autobatch.core.records.tuning import Tuning


class PredictedPoint(Record, frozen=True):
    """Peak that the footprint predicted for a micro-batch before it ran."""

    micro_batch: int
    peak_reserved_bytes: int
    """Compared with the budget; live bytes on devices whose allocator reserves nothing."""


class MemoryCurve(Record, frozen=True):
    """Memory over the events of one optimizer step, by category; all lists are equally long."""

    positions: list[float]
    """Positions in the step, in the unit of ``axis``."""
    categories: dict[str, list[int]]
    """Live bytes by category at each position, drawn from the bottom in this order."""
    axis: str = "allocation event"
    phases: dict[str, float] = {}
    """Start of each phase of the step, by name."""


class RunRecord(Record, frozen=True, kw_only=True):
    """All records of a run; a stage that did not run is None or empty."""

    device: DeviceRecord
    probe: Probe | None = None
    plan: Plan | None = None
    tuning: Tuning | None = None
    training: Training | None = None
    title: str | None = None
    """Name of the workload."""
    command: str | None = None
    """Command that repeats the run."""
    predicted: list[PredictedPoint] = []
    """Predicted peaks around the limit; empty if the step cannot be traced."""
    memory_curve: MemoryCurve | None = None
    """Memory over a step at the limit; None if the step cannot be traced."""
    versions: dict[str, str] = {}
    surroundings: dict[str, str] = {}
    """The machine and the source: cores, threads, the driver, the commit of the working directory."""
    options: dict[str, str | int | float | bool | list[str] | None] = {}
    """Every option of the run, as it was used."""
    created: str | None = None
    """End of the run: ISO date and time, UTC."""
    checkpoints: list[int] = []
    """Steps of the checkpoints that still exist."""
    metrics: list[StepRecord] = []
    """One record per step, in order; the last one if a step ran again. Not part of the JSON."""
    notes: list[str] = []
    """Remarks on the report itself, one per line. Not part of the JSON."""
