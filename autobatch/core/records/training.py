"""Records of a training: its steps and its summary."""

from __future__ import annotations

from autobatch.core.records.base import Record


class StepRecord(Record, frozen=True, kw_only=True):
    """One step of the run: a line of ``metrics.jsonl``."""

    step: int
    """Batches seen, including this one."""
    applied: bool
    """False if the weights did not change: the loss scale overflowed, no item was counted, or a loss or
    gradient was not finite and was skipped."""
    samples: int
    """Samples seen so far by the whole run."""
    loss: float | None
    """Mean over the batch; None if no item was counted."""
    count: float
    """Items that the loss is a mean over."""
    learning_rate: float
    grad_norm: float | None
    micro_batch: int
    accumulation_steps: int
    seconds: float
    """Duration of this step."""
    samples_per_s: float | None = None
    """Throughput of this step."""
    items_per_s: float | None = None
    """Throughput in items that the loss is a mean over, for example tokens; samples by default."""
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    oom_recoveries: int
    """Recoveries so far."""
    validation: dict[str, float | None] = {}
    """Held-out metrics, if validation ran after this step; a value is None if not finite."""
    recovered: str | None = None
    """Message of the out-of-memory error, if this step ran again in smaller micro-batches."""


class Training(Record, frozen=True, kw_only=True):
    """Summary of the training loop."""

    optimizer_steps: int
    samples: int
    samples_per_s: float | None
    """Over all steps of the run, also those before a resume; None if none of them was timed."""
    first_loss: float | None
    final_loss: float | None
    oom_recoveries: int
    resumed_from: str | None
    checkpoint: str | None
    seconds: float = 0.0
    skipped_steps: int = 0
    validation: dict[str, float | None] = {}
    """Held-out metrics at the end; a value is None if not finite."""
    noise_scale: float | None = None
    """Gradient noise scale, in items that the loss is a mean over; None if unknown."""
    noise_band: tuple[float | None, float | None] = (None, None)
    """95 % band of the noise scale; an unknown end is None."""
    noise_advice: str | None = None
    """Advice on the target batch, in a sentence."""
    micro_batch: int | None = None
    """Micro-batch at the end, smaller than the plan's after a recovery."""
    ema: float | None = None
    """Decay of the averaged weights that were validated; None if the weights themselves were."""
    peak_allocated_bytes: int | None = None
    """Largest peak of a step; None if the device does not count it."""
    peak_reserved_bytes: int | None = None
    failed_checkpoints: list[int] = []
    """Steps after which a checkpoint could not be written and the run continued."""
    notes: list[str] = []
    """Findings of the check of the loss, before the training and in its first batches."""
    phase_seconds: dict[str, float] = {}
    """Seconds of the whole run by phase, the largest first: ``data`` (waiting for it), ``forward``,
    ``backward``, ``step`` and ``other`` of the steps, from a sample of them, and ``validation`` and
    ``checkpoint`` between steps."""
