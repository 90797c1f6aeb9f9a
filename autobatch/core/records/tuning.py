"""Records of the tuner: its trials, its comparisons and its choice."""

from __future__ import annotations

from autobatch.core.records.base import Record


class Trial(Record, frozen=True, kw_only=True):
    """One configuration that the tuner measured."""

    number: int
    samples_per_s: float | None
    """Throughput at the effective batch; None if not measured."""
    feasible: bool = True
    """True if it ran within the budget."""
    parameters: dict[str, str | int | float | bool | None] = {}
    micro_batch: int | None = None
    """Micro-batch of the run; None if it did not run."""
    note: str | None = None
    """Reason why it is not feasible, or the origin of its figure."""
    relative: float | None = None
    """Throughput ÷ that of the default around the same time; None if not measured."""
    started: str | None = None
    """Start of the search that ran it: ISO date and time, UTC. A study may go on later."""


class TrialComparison(Record, frozen=True, kw_only=True):
    """A configuration that ran side by side with the default, in several rounds."""

    changes: dict[str, str | int | float | bool | None]
    """Values that differ from the default."""
    ratio: float
    """Throughput ÷ the default's: geometric mean over the rounds."""
    low: float | None
    """Lower end of the 95 % interval of the ratio; None if unknown."""
    high: float | None
    rounds: int
    chosen: bool = False


class LrTrial(Record, frozen=True, kw_only=True):
    """One learning rate that was tried in a short run."""

    number: int
    learning_rate: float
    loss: float | None
    """Mean over the last quarter of the run, or over the part of it that ran; None if not finite."""
    feasible: bool = True
    """True if it trained to the end of the run."""
    note: str | None = None
    """Reason why it is not feasible."""


class LrComparison(Record, frozen=True, kw_only=True):
    """The default learning rate and the best of the trials on the same data."""

    seed: int
    """Seed of the data order."""
    default_loss: float | None
    other_loss: float | None
    gain: float
    """Loss reduction gained over the default, as a share of the other's own loss reduction.

    1 if the default does not train, -1 if the other does not."""


class LrTuning(Record, frozen=True, kw_only=True):
    """Result of the learning-rate study in short runs."""

    trials: int
    steps: int
    """Optimizer steps per run."""
    default: float
    """Learning rate of the plan before tuning."""
    best: float
    """Learning rate of the plan now: the default, unless another was better beyond the noise."""
    default_loss: float | None
    """Mean over the last quarter of a run; None if it was not run or is not finite."""
    best_loss: float | None
    study: str
    history: list[LrTrial] = []
    """Every learning rate that was tried, in order."""
    pairs: list[LrComparison] = []
    """Comparisons that decided the choice."""
    sampler: str = ""
    """Sampler that proposed the trials, in words."""
    seconds: float = 0.0
    notes: list[str] = []
    """Remarks on the choice, one per line."""


class Tuning(Record, frozen=True, kw_only=True):
    """Measurements and choice of the tuner."""

    trials: int
    best: dict[str, str | int | float | bool | None]
    baseline_samples_per_s: float
    best_samples_per_s: float
    study: str
    measured: str | None = None
    """Start of the earlier search that measured both speeds: ISO date and time, UTC. None for this search."""
    history: list[Trial] = []
    """Every configuration that was measured, in order."""
    comparisons: list[TrialComparison] = []
    """The best configurations beside the default, which decided the choice."""
    remembered: int = 0
    """Trials of ``history`` that earlier searches of the study ran."""
    sampler: str = ""
    """Sampler that proposed the trials, in words."""
    seconds: float = 0.0
    """Duration of the search, including the comparison of the best with the default."""
    sampler_seconds: float = 0.0
    """Part of ``seconds`` that the sampler and the storage took."""
    notes: list[str] = []
    """Remarks on the choice, one per line."""
    learning_rate: LrTuning | None = None
    """Result of the learning-rate study; None if it was not asked for."""
